"""Savings by speculation in each step, on all ranks and of the wait for the last answer.

While every worker decodes, they share the work, and the wait gets shorter by the mean saving of all
ranks. Once a worker has run out, only the last worker to finish counts: its rank that decodes
longest. A report that covers that moment is divided between both parts.
"""

from collections.abc import Mapping

from tlt.id_types import Step, WorkerId
from tlt.policies.job.run_state import RunState
from tlt.policies.speculation.savings_estimate import (
    DecodeCost,
    PlainRates,
    SavingsInterval,
    add_tallies,
)
from tlt.protocol.events import DecodingReported

_CostsByBucket = dict[int, DecodeCost]


class _Step:
    def __init__(self) -> None:
        self.total: _CostsByBucket = {}
        # costs of the training rollouts while every worker decoded
        self.shared: _CostsByBucket = {}
        self.ranks = 1
        # the worker whose answer finished last
        self.last: WorkerId | None = None
        # time at which the first worker ran out of prompts
        self.drained: float | None = None
        # costs of each rank after that
        self.tails: dict[tuple[WorkerId, int], _CostsByBucket] = {}

    def critical(self) -> _CostsByBucket:
        """Return the costs that the wait for the last answer consists of."""
        costs: _CostsByBucket = {}
        _add_scaled(costs, self.shared, 1 / self.ranks)
        last = [costs for (worker, _), costs in self.tails.items() if worker == self.last]
        _add_scaled(costs, max(last, key=_seconds, default={}), 1.0)
        return costs

    def tail_share(self, costs: _CostsByBucket, now: float) -> float:
        """Return the share of a rank's costs up to now that lies after `drained`."""
        seconds = _seconds(costs)
        if self.drained is None or now <= self.drained:
            return 0.0
        return min(1.0, (now - self.drained) / seconds) if seconds > 0.0 else 1.0


class StepSavings:
    def __init__(self) -> None:
        self._steps: dict[Step, _Step] = {}

    def open_batch(self, state: RunState) -> None:
        """Begin a rollout batch, and forget what past steps need no longer."""
        for step in self._steps.values():
            step.tails = {rank: costs for rank, costs in step.tails.items() if rank[0] == step.last}
        ranks = sum(known.info.ranks for known in state.workers.values())
        self._steps.setdefault(state.step, _Step()).ranks = max(1, ranks)

    def idle_worker(self, step: Step, now: float) -> None:
        known = self._steps[step]
        known.drained = now if known.drained is None else known.drained

    def finish_answer(self, step: Step, worker: WorkerId) -> None:
        self._steps.setdefault(step, _Step()).last = worker

    def add(self, event: DecodingReported, now: float) -> None:
        step = self._steps.setdefault(event.step, _Step())
        step.total = add_tallies(step.total, event.tallies)
        if event.purpose == "eval":
            return
        costs = add_tallies({}, event.tallies)
        tail = step.tail_share(costs, now)
        _add_scaled(step.shared, costs, 1.0 - tail)
        if tail > 0.0:
            _add_scaled(step.tails.setdefault((event.worker, event.rank), {}), costs, tail)

    def of(
        self, step: Step, rates: PlainRates
    ) -> tuple[SavingsInterval | None, SavingsInterval | None]:
        """Return the saving on all ranks, and that of the wait for the last answer."""
        known = self._steps.get(step)
        if known is None or not rates:
            return None, None
        return rates.saving(known.total), rates.saving(known.critical())


def _seconds(costs: Mapping[int, DecodeCost]) -> float:
    return sum(each.seconds + each.plain_seconds for each in costs.values())


def _add_scaled(costs: _CostsByBucket, more: Mapping[int, DecodeCost], factor: float) -> None:
    """Add a part of `more`, leaving out the statistics of control runs, which can't be divided."""
    for bucket, each in more.items():
        sums = costs.get(bucket, DecodeCost())
        costs[bucket] = DecodeCost(
            tokens=sums.tokens + each.tokens * factor,
            seconds=sums.seconds + each.seconds * factor,
            plain_seconds=sums.plain_seconds + each.plain_seconds * factor,
        )
