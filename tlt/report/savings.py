"""What speculation saved in each step, on all ranks together and of the wait for the last answer.

As long as every worker has something to decode, they share the work: what one saves lets it take
more of it, and the wait is shorter by the mean over all ranks. From the first worker that runs out
on, only what the last to finish saves shortens it; of its ranks, the one that decodes the longest.
Ranks tell what they decoded lately: of what they did around that moment, a part is of each kind.
"""

from collections.abc import Mapping

from tlt.ids import Step, WorkerId
from tlt.policies.job.run_state import RunState
from tlt.policies.speculation.savings_estimate import (
    DecodeCost,
    PlainRates,
    SavingsInterval,
    add_tallies,
)
from tlt.protocol.events import DecodingReported

_Spending = dict[int, DecodeCost]


class _Step:
    def __init__(self) -> None:
        self.total: _Spending = {}
        # of the training rollouts
        self.shared: _Spending = {}
        self.ranks = 1
        self.last: WorkerId | None = None
        # since when some worker has had nothing left to do
        self.drained: float | None = None
        # what each rank did after somebody had run out
        self.alone: dict[tuple[WorkerId, int], _Spending] = {}

    def tail(self) -> _Spending:
        """Of who finished last."""
        found = [spending for (worker, _), spending in self.alone.items() if worker == self.last]
        return max(found, key=_seconds, default={})

    def critical(self) -> _Spending:
        merged = {bucket: _scaled(spent, 1 / self.ranks) for bucket, spent in self.shared.items()}
        for bucket, spent in self.tail().items():
            merged[bucket] = _sum(merged.get(bucket, DecodeCost()), spent)
        return merged

    def part_alone(self, spending: _Spending, now: float) -> float:
        """Of what a rank did until now."""
        seconds = _seconds(spending)
        if self.drained is None or now <= self.drained:
            return 0.0
        return min(1.0, (now - self.drained) / seconds) if seconds > 0.0 else 1.0


class Savings:
    def __init__(self) -> None:
        self._steps: dict[Step, _Step] = {}

    def opens(self, state: RunState) -> None:
        for step in self._steps.values():
            step.alone = {
                who: spending for who, spending in step.alone.items() if who[0] == step.last
            }
        if state.step not in self._steps:
            self._steps[state.step] = _Step()
        ranks = sum(known.info.ranks for known in state.workers.values())
        self._steps[state.step].ranks = max(1, ranks)

    def idles(self, step: Step, now: float) -> None:
        known = self._steps[step]
        known.drained = now if known.drained is None else known.drained

    def finishes(self, step: Step, worker: WorkerId) -> None:
        self._steps.setdefault(step, _Step()).last = worker

    def add(self, event: DecodingReported, now: float) -> None:
        step = self._steps.setdefault(event.step, _Step())
        step.total = add_tallies(step.total, event.tallies)
        if event.purpose == "eval":
            return
        spent = add_tallies({}, event.tallies)
        alone = step.part_alone(spent, now)
        _put(step.shared, spent, 1.0 - alone)
        if alone > 0.0:
            _put(step.alone.setdefault((event.worker, event.rank), {}), spent, alone)

    def of(
        self, step: Step, rates: PlainRates
    ) -> tuple[SavingsInterval | None, SavingsInterval | None]:
        """In all, and of the wait."""
        known = self._steps.get(step)
        if known is None or not rates:
            return None, None
        return rates.saving(known.total), rates.saving(known.critical())


def _seconds(spending: Mapping[int, DecodeCost]) -> float:
    return sum(spent.seconds + spent.plain_seconds for spent in spending.values())


def _put(spending: _Spending, more: Mapping[int, DecodeCost], factor: float) -> None:
    for bucket, spent in more.items():
        spending[bucket] = _sum(spending.get(bucket, DecodeCost()), _scaled(spent, factor))


def _scaled(spent: DecodeCost, factor: float) -> DecodeCost:
    """What a part of it took: runs are not divided."""
    return DecodeCost(
        tokens=spent.tokens * factor,
        seconds=spent.seconds * factor,
        plain_seconds=spent.plain_seconds * factor,
    )


def _sum(one: DecodeCost, other: DecodeCost) -> DecodeCost:
    return DecodeCost(
        tokens=one.tokens + other.tokens,
        seconds=one.seconds + other.seconds,
        plain_seconds=one.plain_seconds + other.plain_seconds,
    )
