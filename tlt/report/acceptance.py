"""Accepted tokens: by proposer and batch size, and by position."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import accumulate
from typing import Literal

import msgspec

from tlt.base.id_types import DrafterVersion
from tlt.base.strategies import Draft, Off
from tlt.protocol.refs import AcceptedCounts
from tlt.protocol.shared_values import StrategyTally

_Proposer = Literal["drafter", "ngram"]


class Acceptance(msgspec.Struct, frozen=True, kw_only=True):
    """The decode steps of one proposer at batch sizes of one bucket."""

    proposer: _Proposer
    drafter: DrafterVersion | None
    bucket: int
    steps: int
    # running rows, summed over the steps
    rows: int
    tokens: int


class Positions(msgspec.Struct, frozen=True, kw_only=True):
    """The shares of one drafter's steps that accepted the first token, the first two, ..."""

    # None: n-grams, or an engine that does not report the drafter
    drafter: DrafterVersion | None
    steps: int
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

    def add_answer(self, counts: Iterable[AcceptedCounts]) -> None:
        for count in counts:
            self._steps[count.drafter].update(dict(enumerate(count.steps)))

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


def _shares(steps: Counter[int]) -> tuple[float, ...]:
    total, most = steps.total(), max(steps, default=0)
    # from the last position back: the steps that accepted at least that many tokens
    reached = list(accumulate(steps[count] for count in range(most, 0, -1)))
    return tuple(count / total for count in reversed(reached))
