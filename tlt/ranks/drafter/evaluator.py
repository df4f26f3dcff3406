"""Measure drafters by their accept length on answers of the current policy."""

from collections.abc import Sequence

from tlt.base.interrupt_check import CheckInterrupt
from tlt.models.eagle_drafter import Drafter
from tlt.policies.drafter.training_evidence import EVALUATION_DEPTH
from tlt.protocol.shared_values import DrafterEvaluation
from tlt.ranks.drafter.replay_buffer import Answer
from tlt.ranks.drafter.samples_from_engine import Text, rollout
from tlt.trainer.drafter.accept_length import PolicyRollout, accept_lengths
from tlt.trainer.drafter.samples import EmbeddingAndHead


class DrafterEvaluator:
    """Compare the drafter that was trained with the one in use."""

    def __init__(self, shared: EmbeddingAndHead, proposes_with_noise: bool) -> None:
        """Replay proposals with the policy's noise, too, if the engine can make them."""
        self._shared = shared
        self._proposes_with_noise = proposes_with_noise

    def evaluate(
        self,
        trained: Drafter,
        used: Drafter | None,
        answers: Sequence[Answer],
        rows: int,
        check: CheckInterrupt,
    ) -> DrafterEvaluation:
        """Return both accept lengths, computed on `rows` rows at once.

        Without answers the evaluation measures nothing, and the gate ignores it.
        """
        if not answers:
            return DrafterEvaluation(accept_length_before=None, accept_length=1.0, answers=0)
        rollouts = [self._rollout(answer) for answer in answers]

        def accept_length(drafter: Drafter) -> float:
            lengths = accept_lengths(
                drafter, self._shared, rollouts, (EVALUATION_DEPTH,), rows, check
            )
            plain = lengths.plain[EVALUATION_DEPTH]
            if not self._proposes_with_noise:
                return plain
            return max(lengths.noise[EVALUATION_DEPTH], plain)

        return DrafterEvaluation(
            accept_length_before=None if used is None else accept_length(used),
            accept_length=accept_length(trained),
            answers=len(answers),
        )

    def _rollout(self, answer: Answer) -> PolicyRollout:
        assert answer.states is not None
        text = Text(id=0, tokens=answer.tokens, prompt=answer.prompt)
        return rollout(text, answer.states, answer.key, len(self._shared.head))
