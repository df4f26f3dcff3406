"""The speed of a simulated engine, by its running rows and their cached tokens.

All rows advance at the same speed. The strategy is chosen anew only when their number or the
magnitude of the cache changes.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from tlt.simulation.inputs import DraftCosts, EngineCosts, interpolate


class Pace(NamedTuple):
    # tokens of a row by a step
    tokens: float
    # of a step whose rows have nothing in the cache
    seconds: float


class EngineSpeed:
    def __init__(self, costs: EngineCosts, drafts: Sequence[DraftCosts] = ()) -> None:
        self.prompt_tokens = costs.prompt_tokens
        self._costs = costs
        self._drafts = drafts
        self._chosen: dict[tuple[int, int], Pace] = {}

    def pace(self, rows: int, cached: float) -> Pace:
        """Return the fastest strategy's pace."""
        key = rows, int(cached).bit_length()
        found = self._chosen.get(key)
        if found is None:
            found = self._chosen[key] = self._choose(rows, self._costs.cached_token * cached)
        return found

    def _choose(self, rows: int, reading: float) -> Pace:
        paces = [Pace(1.0, interpolate(self._costs.plain, rows))]
        for draft in self._drafts:
            tokens = interpolate(draft.tokens, min(rows, max(draft.tokens)))
            paces.append(Pace(tokens, interpolate(draft.seconds, rows)))
        return max(paces, key=lambda pace: pace.tokens / (pace.seconds + reading))

    def seconds(self, pace: Pace, rows: int, cached: float, tokens: float) -> float:
        """Return the seconds in which each row gains these tokens, while the cache grows."""
        reading = self._costs.cached_token * (cached + 0.5 * rows * tokens)
        return tokens / pace.tokens * (pace.seconds + reading)

    def tokens(self, pace: Pace, rows: int, cached: float, seconds: float) -> float:
        """Return the tokens that each row gains in these seconds: the inverse of `seconds`."""
        curvature = 2.0 * self._costs.cached_token * rows * seconds * pace.tokens
        slope = pace.seconds + self._costs.cached_token * cached
        return 2.0 * seconds * pace.tokens / (slope + math.sqrt(slope * slope + curvature))

    def prefill(self, tokens: float) -> float:
        return self._costs.prefill_token * tokens
