"""Write answers to the rank's file, and make the events that report them; cut ones go on later."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from msgspec.structs import replace

from tlt.blobs.answer_files import Answer, Turn, pack_logprobs, pack_origins, pack_tokens
from tlt.engine.base import Completion
from tlt.errors import BlobError
from tlt.models.tokenizer import Tokenizer
from tlt.protocol.commands import PromptIssued
from tlt.protocol.events import RolloutCut, RolloutFinished
from tlt.protocol.rank_messages import EndTrajectory
from tlt.ranks.accepted_counts import count_accepted
from tlt.ranks.rank_job_context import RankJob
from tlt.ranks.request_settings import sampling
from tlt.spec.config import JobSpec

# tokens of a cut answer that are drawn again where a stop string may have begun in them
_OVERLAP = 16
# of an answer that couldn't begin
_NOTHING = Completion(
    id=0,
    tokens=[],
    logprobs=[],
    text="",
    stop="length",
    policies=(),
    drafters=(),
    origins=(),
    batches=(),
    decode_seconds=0.0,
)


@dataclass
class Branch:
    """A conversation of an answer, so far."""

    prompt: tuple[int, ...]
    # log-probs and spans are those of the policy's tokens
    answer: Completion | None = None
    turns: list[Turn] = field(default_factory=list[Turn])

    @property
    def tokens(self) -> Sequence[int]:
        """Return all tokens after the prompt."""
        return () if self.answer is None else self.answer.tokens

    @property
    def drawn(self) -> int:
        """Count the policy's tokens."""
        return 0 if self.answer is None else len(self.answer.logprobs)


@dataclass
class Trajectory:
    """An answer of several turns, so far; an agent may hold several conversations in it."""

    prompt: PromptIssued
    branches: list[Branch]
    # the conversation whose turn is the last one
    at: int = 0
    # that turn's text
    text: str = ""
    # tokens of others before it
    added: Sequence[int] = ()

    @property
    def branch(self) -> Branch:
        return self.branches[self.at]

    @property
    def drawn(self) -> int:
        """Count the policy's tokens of all conversations."""
        return sum(branch.drawn for branch in self.branches)


class AnswerEvents:
    def __init__(self, job: RankJob, tokenizer: Tokenizer) -> None:
        self._spec = job.spec
        self._reporter = job.reporter
        self._tokenizer = tokenizer
        self._files = job.answers
        self._writer = job.answers.writer(job.member)

    def read_prefix(self, prompt: PromptIssued) -> Answer | None:
        """Return the tokens to go on with; an answer that can't be read here begins anew."""
        if prompt.prefix is None:
            return None
        try:
            prefix = self._files.read(prompt.prefix)
        except BlobError:
            return None
        # the engine finds no stop string that began before its first token
        return prefix.first(len(prefix.tokens) - (_OVERLAP if self._spec.rollout.stop else 0))

    def join(self, prefix: Answer, completion: Completion) -> Completion:
        """Return the whole of an answer that was cut."""
        tokens = [*prefix.tokens, *completion.tokens]
        return replace(
            completion,
            tokens=tokens,
            logprobs=[*prefix.logprobs, *completion.logprobs],
            text=self._tokenizer.decode(tokens),
            policies=(*prefix.policies, *completion.policies),
            drafters=(*prefix.drafters, *completion.drafters),
            origins=(*prefix.origins, *completion.origins),
            batches=(*prefix.batches, *completion.batches),
        )

    def finished(self, prompt: PromptIssued, completion: Completion) -> RolloutFinished:
        answer = _answer(self._spec, prompt.tokens, prompt, completion)
        return self._finished(prompt, [completion], answer)

    def judged(self, trajectory: Trajectory, verdict: EndTrajectory) -> RolloutFinished:
        """Report an answer of several turns, with what the environment says of it."""
        prompt = trajectory.prompt
        # one without a turn had no room for any
        written = [b for b in trajectory.branches if b.answer is not None]
        written = written or trajectory.branches[:1]
        completions = [replace(b.answer or _NOTHING, stop=verdict.stop) for b in written]
        first, *others = (
            replace(
                _answer(self._spec, branch.prompt, prompt, completion), turns=tuple(branch.turns)
            )
            for branch, completion in zip(written, completions, strict=True)
        )
        answer = replace(
            first,
            text=trajectory.text,
            reward=verdict.reward,
            metrics=verdict.metrics,
            error=verdict.error,
            branches=tuple(others),
        )
        return self._finished(prompt, completions, answer)

    def _finished(
        self, prompt: PromptIssued, completions: Sequence[Completion], answer: Answer
    ) -> RolloutFinished:
        """Report an answer, which counts all of its conversations."""
        drawn = sum(len(completion.logprobs) for completion in completions)
        tokens = sum(len(completion.tokens) for completion in completions)
        prompts = sum(len(part.prompt) for part in (answer, *answer.branches))
        accepted = [count_accepted(each.origins, each.drafters) for each in completions]
        completion = completions[-1]
        return RolloutFinished(
            **self._reporter,
            epoch=prompt.epoch,
            step=prompt.step,
            attempt=prompt.attempt,
            purpose=prompt.purpose,
            prompt=prompt.prompt,
            member=prompt.member,
            answer=self._writer.append(answer),
            length=drawn,
            accepted=tuple(chain.from_iterable(accepted)),
            batch=completion.batches[-1].size if completion.batches else 0,
            decode_seconds=sum(each.decode_seconds for each in completions),
            stop=completion.stop,
            # with what an environment said
            prompt_length=prompts + tokens - drawn,
            retractions=sum(each.retractions for each in completions),
        )

    def cut(
        self,
        prompt: PromptIssued,
        completion: Completion | None = None,
        prefix: Answer | None = None,
    ) -> RolloutCut:
        """Report an unfinished answer, with the tokens that it had if it has no new ones."""
        answer, seconds = prompt.prefix, 0.0
        # nothing goes on with an answer of a group that is put off
        kept = not self._spec.rollout.defer_long
        if completion is not None and completion.tokens and kept:
            seconds = completion.decode_seconds
            whole = completion if prefix is None else self.join(prefix, completion)
            answer = self._writer.append(_answer(self._spec, prompt.tokens, prompt, whole))
        return RolloutCut(
            **self._reporter,
            epoch=prompt.epoch,
            step=prompt.step,
            attempt=prompt.attempt,
            purpose=prompt.purpose,
            prompt=prompt.prompt,
            member=prompt.member,
            answer=answer,
            decode_seconds=seconds,
            excused=prompt.excused,
        )


def _answer(
    spec: JobSpec, tokens: tuple[int, ...], prompt: PromptIssued, completion: Completion
) -> Answer:
    """Return a completion of these tokens."""
    drawn = sampling(spec, prompt)
    return Answer(
        prompt=tokens,
        token_bytes=pack_tokens(completion.tokens),
        logprob_bytes=pack_logprobs(completion.logprobs),
        text=completion.text,
        temperature=drawn.temperature,
        top_k=drawn.top_k,
        top_p=drawn.top_p,
        min_p=drawn.min_p,
        policies=completion.policies,
        drafters=completion.drafters,
        origin_bytes=pack_origins(completion.origins),
        batches=completion.batches,
    )
