"""When the last answer will be there, as far as the answers that are there can tell.

How many tokens a running answer has is taken from how long it runs, at the pace of those that
finished lately. It ends as the finished ones did that were longer than that, and at the latest
where its room does; the last one ends when all have.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

_STEPS = 18
# answers whose pace is that of now
_LATELY = 64
# an answer that should have ended by its age has so much of its room left
_LEFT = 0.02
# answers that are taken one by one: others are told as so many groups of about the same
_SINGLE = 8
_GROUPS = 16


class Done(msgspec.Struct, frozen=True, array_like=True):
    """A finished answer."""

    tokens: int
    seconds: float


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from now until the last answer is there: as likely sooner as later, and at most."""

    p50: float
    p90: float


class _Group(NamedTuple):
    """So many answers: how many tokens each has, and when it began or will."""

    has: float
    begins: float
    answers: int


def forecast(
    running: Sequence[float],
    finished: Sequence[Done],
    room: int,
    queued: int,
    slots: int,
    unseen: int = 0,
) -> Forecast | None:
    """`running`: seconds since each began, the longest first, and `unseen` more as long as the last
    of them; what is queued begins as the slots become free."""
    tokens = sum(done.tokens for done in finished)
    if not tokens or not (running or queued):
        return None
    lately = finished[-_LATELY:]
    pace = sum(done.seconds for done in lately) / max(1, sum(done.tokens for done in lately))
    pace = max(pace, 1e-9)
    lengths = _Lengths(finished, room)
    typical = pace * tokens / len(finished)
    free = max(0, slots - len(running) - unseen)
    groups = [
        *(_Group(lengths.reached(age / pace), 0.0, n) for age, n in _grouped(running, unseen)),
        *(_Group(0.0, begins, n) for begins, n in _begins(queued, free, typical / max(1, slots))),
    ]
    latest = groups[-1].begins + room * pace

    def all_end_by(seconds: float, share: float) -> bool:
        """With that chance at least."""
        chance = 1.0
        for group in groups:
            more = max(0.0, seconds - group.begins) / pace
            chance *= lengths.ends(group.has, more) ** group.answers
            if chance < share:
                return False
        return True

    def quantile(share: float) -> float:
        low, high = 0.0, latest
        for _ in range(_STEPS):
            middle = (low + high) / 2
            if all_end_by(middle, share):
                high = middle
            else:
                low = middle
        return high

    return Forecast(p50=quantile(0.5), p90=quantile(0.9))


def _grouped(ages: Sequence[float], unseen: int) -> Iterator[tuple[float, int]]:
    """Ages, and how many answers have about that one."""
    for age in ages[:_SINGLE]:
        yield age, 1
    for some in _parts(len(ages) - _SINGLE):
        group = ages[_SINGLE + some.start : _SINGLE + some.stop]
        yield sum(group) / len(group), len(group)
    if unseen and ages:
        yield ages[-1], unseen


def _begins(queued: int, free: int, between: float) -> Iterator[tuple[float, int]]:
    """When so many begin: at once in free slots, then one `between` the other."""
    if queued and free:
        yield 0.0, min(queued, free)
    for some in _parts(queued - free):
        yield (some.start + some.stop + 1) / 2 * between, len(some)


def _parts(count: int) -> Iterator[range]:
    """Of a number, as equal as can be."""
    parts = min(_GROUPS, count)
    for part in range(parts):
        yield range(part * count // parts, (part + 1) * count // parts)


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
