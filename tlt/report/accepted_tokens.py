"""What was accepted of the drafts: by who drafted, for how many rows, and how far into a draft."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Literal

from tlt.ids import DrafterVersion
from tlt.protocol.records import StrategyTally
from tlt.protocol.refs import DrafterSpan, OriginSpan
from tlt.report.run_summary import Acceptance, Positions
from tlt.strategies import Draft, Off

_By = Literal["drafter", "ngram"]


class Accepted:
    def __init__(self) -> None:
        # rounds, rows and tokens
        self._sums: dict[tuple[_By, DrafterVersion | None, int], tuple[int, int, int]] = {}
        # rounds of single rows, by drafter and by how many drafts were accepted
        self._rounds: defaultdict[DrafterVersion | None, Counter[int]] = defaultdict(Counter)

    def add(self, tallies: Iterable[StrategyTally]) -> None:
        for tally in tallies:
            if tally.strategy == Off():
                continue
            by: _By = "drafter" if isinstance(tally.strategy, Draft) else "ngram"
            key = by, tally.drafter, tally.bucket
            rounds, rows, tokens = self._sums.get(key, (0, 0, 0))
            self._sums[key] = rounds + tally.steps, rows + tally.rows, tokens + tally.tokens

    def follow(self, origins: Iterable[OriginSpan], drafters: Sequence[DrafterSpan] = ()) -> None:
        """Of one answer: the policy's own token ends each round, or else the answer does."""
        accepted, version = 0, None
        for origin, tokens, version in _split(origins, drafters):
            match origin:
                case "accepted":
                    accepted += tokens
                case "corrected":
                    rounds = self._rounds[version]
                    rounds[accepted] += 1
                    rounds[0] += tokens - 1
                    accepted = 0
                case _:
                    accepted = 0
        if accepted:
            self._rounds[version][accepted] += 1

    def table(self) -> tuple[Acceptance, ...]:
        def order(key: tuple[_By, DrafterVersion | None, int]) -> tuple[str, int, int]:
            return key[0], -1 if key[1] is None else key[1], key[2]

        return tuple(
            Acceptance(by=key[0], drafter=key[1], bucket=key[2], rounds=n, rows=rows, tokens=tokens)
            for key in sorted(self._sums, key=order)
            for n, rows, tokens in [self._sums[key]]
        )

    def positions(self) -> tuple[float, ...]:
        return _reached(sum(self._rounds.values(), Counter[int]()))

    def by_drafter(self) -> tuple[Positions, ...]:
        versions = sorted(self._rounds, key=lambda version: -1 if version is None else version)
        return tuple(
            Positions(drafter=version, rounds=rounds.total(), shares=_reached(rounds))
            for version in versions
            if (rounds := self._rounds[version]).total()
        )


def _split(
    origins: Iterable[OriginSpan], drafters: Sequence[DrafterSpan]
) -> Iterator[tuple[str, int, DrafterVersion | None]]:
    """Pieces that one drafter, or none, had its say on."""
    version = drafters[-1].version if drafters else None
    if len(drafters) < 2:
        yield from ((span.origin, span.tokens, version) for span in origins)
        return
    turns = iter(drafters)
    turn = next(turns)
    room = turn.tokens
    for span in origins:
        left = span.tokens
        while left > room:
            if room:
                yield span.origin, room, turn.version
            left -= room
            if (following := next(turns, None)) is None:
                break
            turn, room = following, following.tokens
        if left:
            yield span.origin, left, turn.version
        room = max(0, room - left)


def _reached(rounds: Counter[int]) -> tuple[float, ...]:
    total, most = rounds.total(), max(rounds, default=0)
    # from the deepest on: rounds that accepted so many, or more
    deep = list(accumulate(rounds[count] for count in range(most, 0, -1)))
    return tuple(count / total for count in reversed(deep))
