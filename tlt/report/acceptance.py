"""Accepted tokens: by proposer and batch size, and by position."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Literal

import msgspec

from tlt.id_types import DrafterVersion
from tlt.protocol.refs import DrafterSpan, OriginSpan
from tlt.protocol.shared_values import StrategyTally
from tlt.strategies import Draft, Off

_Proposer = Literal["drafter", "ngram"]


class Acceptance(msgspec.Struct, frozen=True, kw_only=True):
    """The decode steps of one proposer at batch sizes of one bucket."""

    proposer: _Proposer = msgspec.field(name="by")
    drafter: DrafterVersion | None
    bucket: int
    steps: int = msgspec.field(name="rounds")
    # running rows, summed over the steps
    rows: int
    tokens: int


class Positions(msgspec.Struct, frozen=True, kw_only=True):
    """The shares of one drafter's steps that accepted the first token, the first two, ..."""

    # None: n-grams, or an engine that does not report the drafter
    drafter: DrafterVersion | None
    steps: int = msgspec.field(name="rounds")
    shares: tuple[float, ...]


class AcceptedTokens:
    def __init__(self) -> None:
        # steps, rows and tokens
        self._sums: dict[tuple[_Proposer, DrafterVersion | None, int], tuple[int, int, int]] = {}
        # steps of single rows, by drafter and by the number of tokens that were accepted
        self._steps: defaultdict[DrafterVersion | None, Counter[int]] = defaultdict(Counter)

    def add_tallies(self, tallies: Iterable[StrategyTally]) -> None:
        for tally in tallies:
            if tally.strategy == Off():
                continue
            proposer: _Proposer = "drafter" if isinstance(tally.strategy, Draft) else "ngram"
            key = proposer, tally.drafter, tally.bucket
            steps, rows, tokens = self._sums.get(key, (0, 0, 0))
            self._sums[key] = steps + tally.steps, rows + tally.rows, tokens + tally.tokens

    def add_answer(
        self, origins: Iterable[OriginSpan], drafters: Sequence[DrafterSpan] = ()
    ) -> None:
        """Count an answer's steps: each ends with a token of the policy, or with the answer."""
        accepted, version = 0, None
        for origin, tokens, version in _split(origins, drafters):
            match origin:
                case "accepted":
                    accepted += tokens
                case "corrected":
                    steps = self._steps[version]
                    steps[accepted] += 1
                    steps[0] += tokens - 1
                    accepted = 0
                case _:
                    accepted = 0
        if accepted:
            self._steps[version][accepted] += 1

    def table(self) -> tuple[Acceptance, ...]:
        rows = (
            Acceptance(
                proposer=proposer,
                drafter=drafter,
                bucket=bucket,
                steps=steps,
                rows=rows,
                tokens=tokens,
            )
            for (proposer, drafter, bucket), (steps, rows, tokens) in self._sums.items()
        )
        return tuple(sorted(rows, key=lambda row: (row.proposer, _age(row.drafter), row.bucket)))

    def positions(self) -> tuple[float, ...]:
        return _shares(sum(self._steps.values(), Counter[int]()))

    def by_drafter(self) -> tuple[Positions, ...]:
        """Return the positions of each drafter, oldest first."""
        return tuple(
            Positions(drafter=version, steps=steps.total(), shares=_shares(steps))
            for version in sorted(self._steps, key=_age)
            if (steps := self._steps[version]).total()
        )


def _age(drafter: DrafterVersion | None) -> int:
    return -1 if drafter is None else drafter


def _split(
    origins: Iterable[OriginSpan], drafters: Sequence[DrafterSpan]
) -> Iterator[tuple[str, int, DrafterVersion | None]]:
    """Split the spans where the drafter changes; yield origin, tokens and drafter of each piece."""
    version = drafters[-1].version if drafters else None
    if len(drafters) < 2:
        yield from ((span.origin, span.tokens, version) for span in origins)
        return
    following = iter(drafters)
    drafter = next(following)
    room = drafter.tokens
    for span in origins:
        left = span.tokens
        while left > room:
            if room:
                yield span.origin, room, drafter.version
            left -= room
            if (successor := next(following, None)) is None:
                break
            drafter, room = successor, successor.tokens
        if left:
            yield span.origin, left, drafter.version
        room = max(0, room - left)


def _shares(steps: Counter[int]) -> tuple[float, ...]:
    total, most = steps.total(), max(steps, default=0)
    # from the last position back: the steps that accepted at least that many tokens
    reached = list(accumulate(steps[count] for count in range(most, 0, -1)))
    return tuple(count / total for count in reversed(reached))
