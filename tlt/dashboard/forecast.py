"""When the last answer will be there, as far as the answers that are there can tell.

How many tokens a running answer has is taken from how long it runs, at the pace of those that
finished lately. It ends as the finished ones did that were longer than that, and at the latest
where its room does; the last one ends when all have.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence

import msgspec

_STEPS = 40
# answers whose pace is that of now
_LATELY = 64
# an answer that should have ended by its age has so much of its room left
_LEFT = 0.02


class Done(msgspec.Struct, frozen=True, array_like=True):
    """A finished answer."""

    tokens: int
    seconds: float


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from now until the last answer is there: as likely sooner as later, and at most."""

    p50: float
    p90: float


def forecast(
    running: Sequence[float], finished: Sequence[Done], room: int, queued: int, slots: int
) -> Forecast | None:
    """`running`: seconds since each began; what is queued begins as the slots become free."""
    tokens = sum(done.tokens for done in finished)
    if not tokens or not (running or queued):
        return None
    lately = finished[-_LATELY:]
    pace = sum(done.seconds for done in lately) / max(1, sum(done.tokens for done in lately))
    wait = queued * pace * tokens / len(finished) / max(1, slots)
    lengths = _Lengths(finished, room)
    # the tokens that each has, and when it began or will
    answers = [(lengths.reached(age / max(pace, 1e-9)), 0.0) for age in running]
    if queued:
        answers.append((0.0, wait))
    latest = wait + room * pace

    def quantile(share: float) -> float:
        low, high = 0.0, latest
        for _ in range(_STEPS):
            middle = (low + high) / 2
            chances = (
                lengths.ends(has, max(0.0, middle - begins) / max(pace, 1e-9))
                for has, begins in answers
            )
            if math.prod(chances) < share:
                low = middle
            else:
                high = middle
        return high

    return Forecast(p50=quantile(0.5), p90=quantile(0.9))


class _Lengths:
    def __init__(self, finished: Sequence[Done], room: int) -> None:
        self._ordered = sorted(done.tokens for done in finished)
        self._room = max(room, self._ordered[-1])

    def reached(self, tokens: float) -> float:
        return min(tokens, self._room * (1.0 - _LEFT))

    def ends(self, has: float, more: float) -> float:
        """The chance that an answer of so many tokens ends within so many more."""
        return 1.0 - self._longer(has + more) / self._longer(has)

    def _longer(self, tokens: float) -> float:
        """Somebody may always be longer than all that were seen, up to the room."""
        if tokens >= self._room:
            return 0.0
        longest = self._ordered[-1]
        beyond = 1.0
        if tokens > longest:
            beyond -= (tokens - longest) / (self._room - longest)
        longer = len(self._ordered) - bisect_right(self._ordered, tokens)
        return (longer + beyond) / (len(self._ordered) + 1.0)
