"""Where the time of each step went; those that are over are looked at again now and then."""

import math
from collections.abc import Sequence

import msgspec

from tlt.ids import Step
from tlt.policies.speculation.savings_estimate import SavingsInterval
from tlt.report import StepAccount
from tlt.report.time_by_duty import summed

# what was saved in steps that are over becomes surer with each control run
_RENEWED_SECONDS = 60.0


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    step: Step
    seconds: float
    # of all workers, by duty
    duties: dict[str, float]
    saved: SavingsInterval | None
    critical: SavingsInterval | None


class StepTimes:
    def __init__(self) -> None:
        self._known: list[StepTime] = []
        self._renewed = -math.inf

    def since(self, now: float, ended: bool) -> Step:
        """The first step that has to be looked at: time still passes in the last one."""
        if ended or now - self._renewed >= _RENEWED_SECONDS:
            self._renewed = now
            return Step(0)
        return self._known[-1].step if self._known else Step(0)

    def learn(self, accounts: Sequence[StepAccount]) -> Sequence[StepTime]:
        """Of the steps since then; returns those of all."""
        while self._known and accounts and self._known[-1].step >= accounts[0].step:
            self._known.pop()
        self._known += map(_step_time, accounts)
        return self._known


def _step_time(account: StepAccount) -> StepTime:
    return StepTime(
        step=account.step,
        seconds=round(account.seconds, 3),
        duties={
            duty: round(seconds, 3) for duty, seconds in summed(account.workers.values()).items()
        },
        saved=_rounded(account.saved),
        critical=_rounded(account.critical) if account.rollout is not None else None,
    )


def _rounded(saving: SavingsInterval | None) -> SavingsInterval | None:
    if saving is None:
        return None
    return SavingsInterval(
        seconds=round(saving.seconds, 3),
        low=None if saving.low is None else round(saving.low, 3),
        high=None if saving.high is None else round(saving.high, 3),
    )
