"""What drafters came to where they were asked: a canary may be wrong, the rollouts are not.

The one in use is held against the one before it, way by way: what a chain of six gains says nothing
about a chain of two. What the job names is known by what it comes to lately, in chains of any
length.
"""

from collections.abc import Mapping, Sequence

import msgspec

from tlt.ids import DrafterVersion
from tlt.protocol.records import StrategyTally
from tlt.strategies import Draft

# rows after which a drafter is known, and after which it is not looked at any more: what it loses
# later it loses to the policy, which moves
_KNOWN = 2000
_SETTLED = 20_000
# rows after which all of them count half
_LATELY = 40_000
# of the accept length of the one before
_FALLEN = 0.8
_HALVINGS = 20


class Asked(msgspec.Struct, frozen=True, array_like=True):
    """Rows that a drafter guessed for, and the tokens that these gained."""

    rows: int = 0
    tokens: int = 0


# by depth and kind of a chain
Heard = dict[str, Asked]


def heard(
    before: Mapping[str, Asked], tallies: Sequence[StrategyTally], drafter: DrafterVersion
) -> Heard:
    """And what these tallies add to it."""
    if _rows(before) >= _SETTLED:
        return dict(before)
    return _added(before, tallies, drafter)


def _added(
    before: Mapping[str, Asked], tallies: Sequence[StrategyTally], drafter: DrafterVersion
) -> Heard:
    found = dict(before)
    for tally in tallies:
        if isinstance(tally.strategy, Draft) and tally.drafter == drafter:
            way = f"{tally.strategy.depth} {'noisy' if tally.strategy.noise else 'plain'}"
            known = found.get(way, Asked())
            found[way] = Asked(known.rows + tally.rows, known.tokens + tally.tokens)
    return found


def lately(
    before: Mapping[str, Asked], tallies: Sequence[StrategyTally], drafter: DrafterVersion
) -> Heard:
    """Where the last rows count as much as all that came before them."""
    found = _added(before, tallies, drafter)
    if _rows(found) < _LATELY:
        return found
    return {way: Asked(asked.rows // 2, asked.tokens // 2) for way, asked in found.items()}


def accept_length(one: Mapping[str, Asked], depth: int) -> float | None:
    """By so many guesses, if each is as likely to be right as it was found to be in chains of any
    length; None of a drafter that is not known yet."""
    if not is_known(one):
        return None
    lengths = ((asked.rows, _length(_likely(way, asked), depth)) for way, asked in one.items())
    return sum(rows * length for rows, length in lengths) / _rows(one)


def _likely(way: str, asked: Asked) -> float:
    """How often a guess is right, by halving: chains of `depth` then come to what these came to."""
    depth, low, high = int(way.split(maxsplit=1)[0]), 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        short = asked.rows * _length(middle, depth) < asked.tokens
        low, high = (middle, high) if short else (low, middle)
    return low


def _length(likely: float, depth: int) -> float:
    return sum(likely**guess for guess in range(depth + 1))


def faded(one: Mapping[str, Asked], measured: float, now: float) -> Heard:
    """As it would be heard now: of this accept length in a canary once, and of that one today.

    The policy has moved away from a drafter that does worse than it did.
    """
    share = min(1.0, now / max(measured, 1.0))
    return {way: Asked(asked.rows, round(asked.tokens * share)) for way, asked in one.items()}


def is_known(one: Mapping[str, Asked]) -> bool:
    return _rows(one) >= _KNOWN


def fallen(now: Mapping[str, Asked], before: Mapping[str, Asked]) -> tuple[float, float] | None:
    """The accept lengths of both, asked in the same ways, if the newer one is much worse."""
    rows, tokens, expected = 0, 0, 0.0
    for way in sorted(now.keys() & before.keys()):
        rows += now[way].rows
        tokens += now[way].tokens
        expected += now[way].rows * before[way].tokens / max(1, before[way].rows)
    if rows < _KNOWN or tokens >= _FALLEN * expected:
        return None
    return tokens / rows, expected / rows


def _rows(one: Mapping[str, Asked]) -> int:
    return sum(asked.rows for asked in one.values())
