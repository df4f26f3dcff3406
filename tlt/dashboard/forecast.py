"""When the last answer will be there, as far as the answers that are there can tell.

Each running answer ends as the finished ones did that took longer than it has by now; the last one
ends when all have. Beyond the longest that was seen, the chance to go on halves with every half of
that length.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence

import msgspec

_STEPS = 40


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from now until the last answer is there: as likely sooner as later, and at most."""

    p50: float
    p90: float


def forecast(
    running: Sequence[float], finished: Sequence[float], queued: int, slots: int
) -> Forecast | None:
    """`running`: seconds since each began; `finished`: what others took, in seconds."""
    if not finished or not (running or queued):
        return None
    ordered = sorted(finished)
    wait = queued * sum(ordered) / len(ordered) / max(1, slots)
    # what waits begins later, and is then as new as any
    ages = [*running, *([-wait] if queued else [])]
    return Forecast(p50=_quantile(ages, ordered, 0.5), p90=_quantile(ages, ordered, 0.9))


def _quantile(ages: Sequence[float], ordered: Sequence[float], share: float) -> float:
    low, high = 0.0, 20.0 * ordered[-1] + max(0.0, -min(ages))
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if _all_done(ages, ordered, middle) < math.log(share):
            low = middle
        else:
            high = middle
    return high


def _all_done(ages: Sequence[float], ordered: Sequence[float], later: float) -> float:
    """The logarithm of the chance."""
    total = 0.0
    for age in ages:
        goes_on = _survival(ordered, age + later) - _survival(ordered, max(0.0, age))
        if goes_on >= 0.0:
            return -math.inf
        total += math.log1p(-math.exp(goes_on))
    return total


def _survival(ordered: Sequence[float], seconds: float) -> float:
    """The logarithm of the chance to take longer than that."""
    if seconds <= 0.0:
        return 0.0
    longest = ordered[-1]
    longer = len(ordered) - bisect_right(ordered, seconds)
    if longer:
        return math.log((longer + 1.0) / (len(ordered) + 1.0))
    beyond = (seconds - longest) / max(longest / 2, 1e-9)
    return -beyond * math.log(2.0) - math.log(len(ordered) + 1.0)
