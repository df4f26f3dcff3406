"""Savings by speculation in each step: rank seconds, and the job's own seconds.

Both compare the replay of the step's rollout batches with what was spent: the rank seconds those of
all ranks, the job's seconds those of the rank that ended last.
"""

from tlt.base.id_types import Step, WorkerId
from tlt.policies.speculation.plain_replay import Replay
from tlt.policies.speculation.plain_step_costs import (
    PlainStepCosts,
    SavingsInterval,
    StepsByKnot,
    add_steps,
)
from tlt.protocol.events import DecodingReported

# a worker and its rank
_Rank = tuple[WorkerId, int]


class _Batch:
    """A step's training rollouts or its evaluation."""

    def __init__(self) -> None:
        self.seconds: dict[_Rank, float] = {}
        self.replay: Replay | None = None
        # the worker whose answer finished last
        self.last: WorkerId | None = None

    @property
    def last_seconds(self) -> float:
        """Return the seconds of the last worker's rank that decoded longest."""
        return max((s for (worker, _), s in self.seconds.items() if worker == self.last), default=0)


class StepSavings:
    def __init__(self) -> None:
        self._batches: dict[tuple[Step, str], _Batch] = {}

    def finish_answer(self, step: Step, worker: WorkerId) -> None:
        self._batch(step, "train").last = worker

    def add(self, event: DecodingReported) -> None:
        seconds, rank = self._batch(event.step, event.purpose).seconds, (event.worker, event.rank)
        seconds[rank] = seconds.get(rank, 0.0) + sum(tally.work for tally in event.tallies)

    def close_batch(self, step: Step, purpose: str, replay: Replay | None) -> None:
        self._batch(step, purpose).replay = replay

    def of(
        self, step: Step, plain: PlainStepCosts | None
    ) -> tuple[SavingsInterval | None, SavingsInterval | None]:
        """Return the savings of all ranks, and those of the wait for the last answer."""
        if plain is None:
            return None, None
        steps: StepsByKnot = {}
        spent, known = 0.0, False
        for purpose in ("train", "eval"):
            batch = self._batches.get((step, purpose))
            if batch is not None and batch.replay is not None:
                steps = add_steps(steps, batch.replay.steps)
                spent += sum(batch.seconds.values())
                known = True
        waited = None
        training = self._batches.get((step, "train"))
        if training is not None and training.replay is not None:
            waited = plain.saving(training.replay.last, training.last_seconds)
        return plain.saving(steps, spent) if known else None, waited

    def _batch(self, step: Step, purpose: str) -> _Batch:
        return self._batches.setdefault((step, purpose), _Batch())
