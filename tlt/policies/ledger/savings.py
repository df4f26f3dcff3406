"""What speculation saved in each step, on all ranks together and of the wait for the last answer.

As long as every worker has something to decode, they share the work: what one saves lets it take
more of it, and the wait is shorter by the mean over all ranks. From the first worker that runs out
on, only what the last to finish saves shortens it; of its ranks, the one that decodes the longest.
"""

from collections.abc import Mapping

import msgspec

from tlt.messages import StrategyChosen
from tlt.policies.run_state import RunState
from tlt.policies.saved import Rates, Saving, Spent, spend
from tlt.types import Step, WorkerId

_Spending = dict[int, Spent]


class _Step:
    def __init__(self) -> None:
        self.total: _Spending = {}
        # of the training rollouts
        self.shared: _Spending = {}
        self.ranks = 1
        self.last: WorkerId | None = None
        # whether some worker had nothing left to do
        self.drained = False
        # what each rank did after somebody had run out
        self.alone: dict[tuple[WorkerId, int], _Spending] = {}

    def tail(self) -> _Spending:
        """Of who finished last."""
        found = [spending for (worker, _), spending in self.alone.items() if worker == self.last]
        return max(found, key=_seconds, default={})

    def critical(self) -> _Spending:
        merged = {bucket: _scaled(spent, 1 / self.ranks) for bucket, spent in self.shared.items()}
        for bucket, spent in self.tail().items():
            merged[bucket] = _sum(merged.get(bucket, Spent()), spent)
        return merged


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

    def idles(self, step: Step) -> None:
        self._steps[step].drained = True

    def finishes(self, step: Step, worker: WorkerId) -> None:
        self._steps.setdefault(step, _Step()).last = worker

    def add(self, event: StrategyChosen) -> None:
        step = self._steps.setdefault(event.step, _Step())
        step.total = spend(step.total, event.tallies)
        if event.purpose == "eval":
            return
        if step.drained:
            who = event.worker, event.rank
            step.alone[who] = spend(step.alone.get(who, {}), event.tallies)
        else:
            step.shared = spend(step.shared, event.tallies)

    def of(self, step: Step, rates: Rates) -> tuple[Saving | None, Saving | None]:
        """In all, and of the wait."""
        known = self._steps.get(step)
        if known is None or not rates:
            return None, None
        return rates.saving(known.total), rates.saving(known.critical())


def _seconds(spending: Mapping[int, Spent]) -> float:
    return sum(spent.seconds + spent.plain_seconds for spent in spending.values())


def _scaled(spent: Spent, factor: float) -> Spent:
    return msgspec.structs.replace(
        spent, tokens=spent.tokens * factor, seconds=spent.seconds * factor
    )


def _sum(one: Spent, other: Spent) -> Spent:
    return msgspec.structs.replace(
        one, tokens=one.tokens + other.tokens, seconds=one.seconds + other.seconds
    )
