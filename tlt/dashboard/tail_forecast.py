"""Forecast of when the last answer of a rollout batch is finished, from those that are.

A running answer's tokens are estimated from its age and the recent seconds per token. It ends as
finished answers did that were longer than it is now, and at its token limit at the latest.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

_BISECTIONS = 18
# finished answers that the current seconds per token are taken from
_RECENT = 64
# share of its token limit that is left to an answer that should have ended by its age
_LEFT = 0.02
# running answers that are computed one by one, and groups of similar age for the others
_SINGLE = 8
_GROUPS = 16


class FinishedAnswer(msgspec.Struct, frozen=True, array_like=True):
    tokens: int
    seconds: float


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Quantiles of the seconds from now until the last answer is finished."""

    p50: float
    p90: float


class _Group(NamedTuple):
    """Answers that have the same number of tokens and start at the same time."""

    tokens: float
    starts: float
    answers: int


def forecast(
    running: Sequence[float],
    finished: Sequence[FinishedAnswer],
    limit: int,
    queued: int,
    slots: int,
    unseen: int = 0,
) -> Forecast | None:
    """Return a forecast, or None while nothing has finished or nothing is left.

    `running` has the seconds since each answer began, the longest first; `unseen` more are as old
    as the last of them. `limit` is an answer's token limit. Queued answers start as slots free up.
    """
    tokens = sum(answer.tokens for answer in finished)
    if not tokens or not (running or queued):
        return None
    recent = finished[-_RECENT:]
    seconds_per_token = sum(answer.seconds for answer in recent) / max(
        1, sum(answer.tokens for answer in recent)
    )
    seconds_per_token = max(seconds_per_token, 1e-9)
    lengths = _Lengths(finished, limit)
    typical = seconds_per_token * tokens / len(finished)
    free = max(0, slots - len(running) - unseen)
    groups = [
        *(
            _Group(lengths.clamp(age / seconds_per_token), 0.0, n)
            for age, n in _grouped_ages(running, unseen)
        ),
        *(_Group(0.0, starts, n) for starts, n in _starts(queued, free, typical / max(1, slots))),
    ]
    latest = groups[-1].starts + limit * seconds_per_token

    def all_end_by(seconds: float, probability: float) -> bool:
        chance = 1.0
        for group in groups:
            more = max(0.0, seconds - group.starts) / seconds_per_token
            chance *= lengths.end_probability(group.tokens, more) ** group.answers
            if chance < probability:
                return False
        return True

    def quantile(probability: float) -> float:
        low, high = 0.0, latest
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            if all_end_by(middle, probability):
                high = middle
            else:
                low = middle
        return high

    return Forecast(p50=quantile(0.5), p90=quantile(0.9))


def _grouped_ages(ages: Sequence[float], unseen: int) -> Iterator[tuple[float, int]]:
    """Yield ages, and how many answers have about that age."""
    for age in ages[:_SINGLE]:
        yield age, 1
    for part in _parts(len(ages) - _SINGLE):
        group = ages[_SINGLE + part.start : _SINGLE + part.stop]
        yield sum(group) / len(group), len(group)
    if unseen and ages:
        yield ages[-1], unseen


def _starts(queued: int, free: int, between: float) -> Iterator[tuple[float, int]]:
    """Yield start times and how many answers start then: free slots at once, others in turn."""
    if queued and free:
        yield 0.0, min(queued, free)
    for part in _parts(queued - free):
        yield (part.start + part.stop + 1) / 2 * between, len(part)


def _parts(count: int) -> Iterator[range]:
    """Split `range(count)` into parts of about equal size."""
    parts = min(_GROUPS, count)
    for part in range(parts):
        yield range(part * count // parts, (part + 1) * count // parts)


class _Lengths:
    """The distribution of an answer's length, from those of finished answers."""

    def __init__(self, finished: Sequence[FinishedAnswer], limit: int) -> None:
        self._ordered = sorted(answer.tokens for answer in finished)
        self._limit = max(limit, self._ordered[-1])

    def clamp(self, tokens: float) -> float:
        return min(tokens, self._limit * (1.0 - _LEFT))

    def end_probability(self, tokens: float, more: float) -> float:
        """Return the probability that an answer of `tokens` ends within `more` tokens."""
        return 1.0 - self._share_longer(tokens + more) / self._share_longer(tokens)

    def _share_longer(self, tokens: float) -> float:
        """Return the share of longer answers; one beyond all seen, up to the limit, is counted."""
        if tokens >= self._limit:
            return 0.0
        longest = self._ordered[-1]
        beyond = 1.0
        if tokens > longest:
            beyond -= (tokens - longest) / (self._limit - longest)
        longer = len(self._ordered) - bisect_right(self._ordered, tokens)
        return (longer + beyond) / (len(self._ordered) + 1.0)
