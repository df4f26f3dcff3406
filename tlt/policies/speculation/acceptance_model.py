"""How many drafted tokens are accepted, depth by depth, of one way of proposing.

A rate is conditional: of the rows whose earlier drafts were all accepted, how many accept this
one. What was never seen takes after another way that was, or else after the depth above it, so
every depth has an estimate. A rate that the last few rows contradict begins again from those.
"""

import math
from collections.abc import Sequence

# as many rows as a rate remembers, and as many rounds where a round has many rows
_MEMORY_ROWS = 400.0
_MEMORY_ROUNDS = 8.0
# the last few rows, and so many standard deviations by which chance alone hardly moves their rate
_RECENT_ROWS = 24.0
_CONTRADICTION = 5.0
# a round of more rows is soon forgotten anyway, and its rows, often siblings, are not independent
_MOST_ROWS = 8
# in rows: how firmly a depth is believed to be like the one above it
_LIKENESS = 4.0
# rows that old knowledge still counts for, however old
_LEAST_WEIGHT = 4.0


class AcceptanceModel:
    def __init__(self, first: float, memory: float = _MEMORY_ROWS) -> None:
        """`first`: the guess for depth 1 before anything was seen. `memory` in rows."""
        self._first = first
        self._memory = memory
        self._rates: list[float] = []
        self._recent: list[float] = []
        self._weights: list[float] = []
        self._gains: list[float] = [0.0]
        self._like: AcceptanceModel | None = None

    def take_after(self, other: "AcceptanceModel") -> None:
        """Where only the other was seen yet."""
        self._like, other._like = other, self

    def gains(self, depth: int) -> Sequence[float]:
        """At index d: how many of d drafts a row is expected to accept; to this depth at least."""
        if len(self._gains) <= depth:
            self._extend(depth)
        return self._gains

    def observe(self, reached: Sequence[int], accepted: Sequence[int]) -> None:
        if not reached or reached[0] <= 0:
            return
        if len(self._rates) < len(reached):
            self._extend(len(reached))
        rates, weights = self._rates, self._weights
        memory = max(self._memory, _MEMORY_ROUNDS * reached[0])
        above = self._first
        for index, (rows, hits) in enumerate(zip(reached, accepted, strict=True)):
            if rows <= 0:
                break
            if weights[index] == 0.0:
                rates[index], weights[index] = above, _LIKENESS
                self._recent[index] = above
            seen = min(max(hits / rows, 0.0), 1.0)
            weights[index] = min(weights[index] + rows, memory)
            rates[index] += min(rows / weights[index], 1.0) * (seen - rates[index])
            self._recent[index] += min(rows / _RECENT_ROWS, 1.0) * (seen - self._recent[index])
            self._heed_contradiction(index, rows)
            above = rates[index]
        self._gains = [0.0]
        if self._like is not None:
            self._like._gains = [0.0]

    def _heed_contradiction(self, index: int, rows: float) -> None:
        """What is seen lately may have nothing to do with what was seen before."""
        if rows > _MOST_ROWS or self._weights[index] <= _RECENT_ROWS:
            return
        # what a running mean with that share of the newest knows as much as
        few = 2.0 * _RECENT_ROWS - rows
        cautious = (self._rates[index] * few + 1.0) / (few + 2.0)
        chance = math.sqrt(cautious * (1.0 - cautious) / few)
        if abs(self._recent[index] - self._rates[index]) > _CONTRADICTION * chance:
            self._rates[index], self._weights[index] = self._recent[index], _RECENT_ROWS

    def doubt(self, depth: int) -> float:
        """The standard deviation of the logarithm of the tokens that a round yields."""
        gains = self.gains(depth)
        tokens = 1.0 + gains[depth]
        above, variance = self._first, 0.0
        for index in range(depth):
            rate, weight = self._believed(index, above)
            # a rule of succession: three refusals in a row don't prove that all are refused
            cautious = (rate * weight + 1.0) / (weight + 2.0)
            deeper = (gains[depth] - gains[index]) / max(rate, 0.05)
            variance += (deeper / tokens) ** 2 * cautious * (1.0 - cautious) / weight
            above = rate
        return math.sqrt(variance)

    def fade(self, share: float, most: float = math.inf) -> None:
        """What was seen counts for less; the estimates stay."""
        for index, weight in enumerate(self._weights):
            if weight > 0.0:
                self._weights[index] = max(min(weight * share, most), _LEAST_WEIGHT)
        self._gains = [0.0]

    def _believed(self, index: int, above: float) -> tuple[float, float]:
        like = self._like
        if like is not None and self._weights[index] == 0.0:
            seen = index < len(like._weights) and like._weights[index] > 0.0
            above = like._rates[index] if seen else above
        weight = self._weights[index] + _LIKENESS
        return (self._rates[index] * self._weights[index] + above * _LIKENESS) / weight, weight

    def _extend(self, depth: int) -> None:
        missing = depth - len(self._rates)
        if missing > 0:
            self._rates += [0.0] * missing
            self._recent += [0.0] * missing
            self._weights += [0.0] * missing
        above, survival, gain = self._first, 1.0, 0.0
        self._gains = [0.0]
        for index in range(len(self._rates)):
            above, _ = self._believed(index, above)
            survival *= above
            gain += survival
            self._gains.append(gain)
