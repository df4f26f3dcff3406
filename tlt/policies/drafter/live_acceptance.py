"""Measure drafters by the rollouts they propose for: an evaluation may mislead, rollouts can't.

The drafter in use is compared with the one before it for each length of chain, because gains of
long chains say nothing about short ones.
"""

from collections.abc import Mapping, Sequence

import msgspec

from tlt.base.id_types import DrafterVersion
from tlt.base.strategies import Draft
from tlt.protocol.shared_values import StrategyTally

# rows after which a drafter is known
_KNOWN = 2000
# rows after which it isn't measured any more, because later losses are due to policy updates
_SETTLED = 20_000
# share of the expected accept length below which a drafter has regressed
_REGRESSED = 0.8


class ChainTally(msgspec.Struct, frozen=True, array_like=True):
    """Rows that a drafter proposed for, and the tokens that they gained."""

    rows: int = 0
    tokens: int = 0


# by depth and kind of the chain, such as "4 noisy"
LiveAcceptance = dict[str, ChainTally]


def add_tallies(
    live: Mapping[str, ChainTally], tallies: Sequence[StrategyTally], drafter: DrafterVersion
) -> LiveAcceptance:
    """Add the tallies of this drafter until it has enough rows to be settled."""
    found = dict(live)
    if _rows(live) >= _SETTLED:
        return found
    for tally in tallies:
        if isinstance(tally.strategy, Draft) and tally.drafter == drafter:
            chain = f"{tally.strategy.depth} {'noisy' if tally.strategy.noise else 'plain'}"
            known = found.get(chain, ChainTally())
            found[chain] = ChainTally(known.rows + tally.rows, known.tokens + tally.tokens)
    return found


def scale_to_current_policy(
    live: Mapping[str, ChainTally], measured: float, now: float
) -> LiveAcceptance:
    """Scale gains by what the drafter's evaluated accept length has lost since it was `measured`.

    The policy moves away from a drafter, which then does worse than under earlier versions.
    """
    share = min(1.0, now / max(measured, 1.0))
    return {
        chain: ChainTally(each.rows, round(each.tokens * share)) for chain, each in live.items()
    }


def is_known(live: Mapping[str, ChainTally]) -> bool:
    return _rows(live) >= _KNOWN


def find_regression(
    live: Mapping[str, ChainTally], fallback: Mapping[str, ChainTally]
) -> tuple[float, float] | None:
    """Return both accept lengths in chains that both proposed, if `live` is much worse."""
    rows, tokens, expected = 0, 0, 0.0
    for chain in sorted(live.keys() & fallback.keys()):
        rows += live[chain].rows
        tokens += live[chain].tokens
        expected += live[chain].rows * fallback[chain].tokens / max(1, fallback[chain].rows)
    if rows < _KNOWN or tokens >= _REGRESSED * expected:
        return None
    return tokens / rows, expected / rows


def _rows(live: Mapping[str, ChainTally]) -> int:
    return sum(tally.rows for tally in live.values())
