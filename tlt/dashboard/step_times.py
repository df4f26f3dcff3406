"""Seconds of each step by duty, and what speculation saved in it."""

import math
from collections.abc import Sequence

import msgspec

from tlt.base.id_types import Step
from tlt.policies.speculation.savings_estimate import SavingsInterval
from tlt.report import StepAccount
from tlt.report.duties import sum_by_duty

# estimates of past steps' savings become surer with each control run
_REFRESH_SECONDS = 60.0


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    step: Step
    seconds: float
    # summed over all workers
    duties: dict[str, float]
    savings: SavingsInterval | None
    # what was saved of the wait for the last answer
    wait_savings: SavingsInterval | None


class StepTimes:
    def __init__(self) -> None:
        self._rows: list[StepTime] = []
        self._refreshed = -math.inf

    def start_refresh(self, now: float, ended: bool) -> Step:
        """Return the first step to compute again: the last one, or now and then all of them."""
        if ended or now - self._refreshed >= _REFRESH_SECONDS:
            self._refreshed = now
            return Step(0)
        return self._rows[-1].step if self._rows else Step(0)

    def replace(self, accounts: Sequence[StepAccount]) -> Sequence[StepTime]:
        """Replace the rows from the first of `accounts` on, and return all rows."""
        while self._rows and accounts and self._rows[-1].step >= accounts[0].step:
            self._rows.pop()
        self._rows += map(_step_time, accounts)
        return self._rows


def _step_time(account: StepAccount) -> StepTime:
    return StepTime(
        step=account.step,
        seconds=round(account.seconds, 3),
        duties={
            duty: round(seconds, 3)
            for duty, seconds in sum_by_duty(account.workers.values()).items()
        },
        savings=_rounded(account.savings),
        wait_savings=_rounded(account.wait_savings) if account.rollout is not None else None,
    )


def _rounded(saving: SavingsInterval | None) -> SavingsInterval | None:
    if saving is None:
        return None
    return SavingsInterval(
        seconds=round(saving.seconds, 3),
        low=round(saving.low, 3),
        high=round(saving.high, 3),
    )
