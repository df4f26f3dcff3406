"""What drafters came to where they were asked: a canary may be wrong, the rollouts are not.

The one in use is held against the one before it, way by way: what a chain of six gains says nothing
about a chain of two.
"""

from collections.abc import Mapping, Sequence

import msgspec

from tlt.messages import StrategyTally
from tlt.strategies import Draft
from tlt.types import DrafterVersion

# rows after which a drafter is known, and after which it is not looked at any more: what it loses
# later it loses to the policy, which moves
_KNOWN = 2000
_SETTLED = 20_000
# of the accept length of the one before
_FALLEN = 0.8


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
    found = dict(before)
    if _rows(found) >= _SETTLED:
        return found
    for tally in tallies:
        if isinstance(tally.strategy, Draft) and tally.drafter == drafter:
            way = f"{tally.strategy.depth} {'noisy' if tally.strategy.noise else 'plain'}"
            known = found.get(way, Asked())
            found[way] = Asked(known.rows + tally.rows, known.tokens + tally.tokens)
    return found


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
