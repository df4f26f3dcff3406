"""Estimate how many drafts of one proposer are accepted, depth by depth.

A rate is conditional: of the rows whose earlier drafts were all accepted, the share that accepts
the next one. A depth without data borrows the rate of a linked model that has some, or else of the
depth above, so every depth has an estimate. A rate that recent rows contradict restarts from them.
"""

import math
from collections.abc import Sequence

# rows that a rate remembers, and steps that it remembers where a step has many rows
_MEMORY_ROWS = 400.0
_MEMORY_STEPS = 8.0
# the size of the recent window in rows, and how many standard deviations are a contradiction
_RECENT_ROWS = 24.0
_CONTRADICTION = 5.0
# limit of the rows that a step counts for, because rows of one step are not independent
_MOST_ROWS = 8
# rows that the prior counts for: a depth is assumed to accept like the one above it
_PRIOR_ROWS = 4.0
# rows that old data counts for at least
_LEAST_WEIGHT = 4.0


class AcceptanceModel:
    def __init__(self, first: float, memory: float = _MEMORY_ROWS) -> None:
        """Start from the rate `first` at depth 1, and remember `memory` rows."""
        self._first = first
        self._memory = memory
        self._rates: list[float] = []
        self._recent: list[float] = []
        self._weights: list[float] = []
        self._expected: list[float] = [0.0]
        self._linked: AcceptanceModel | None = None

    def link(self, other: "AcceptanceModel") -> None:
        """Let either model borrow a rate that only the other has data for."""
        self._linked, other._linked = other, self

    def expected_accepts(self, depth: int) -> Sequence[float]:
        """Return, at index d, how many of d drafts a row accepts; at least up to `depth`."""
        if len(self._expected) <= depth:
            self._extend(depth)
        return self._expected

    def observe(self, reached: Sequence[int], accepted: Sequence[int]) -> None:
        """Learn from counts as `StepObservation` defines them."""
        if not reached or reached[0] <= 0:
            return
        if len(self._rates) < len(reached):
            self._extend(len(reached))
        rates, weights = self._rates, self._weights
        memory = max(self._memory, _MEMORY_STEPS * reached[0])
        above = self._first
        for index, (rows, hits) in enumerate(zip(reached, accepted, strict=True)):
            if rows <= 0:
                break
            if weights[index] == 0.0:
                rates[index], weights[index] = above, _PRIOR_ROWS
                self._recent[index] = above
            seen = min(max(hits / rows, 0.0), 1.0)
            weights[index] = min(weights[index] + rows, memory)
            rates[index] += min(rows / weights[index], 1.0) * (seen - rates[index])
            self._recent[index] += min(rows / _RECENT_ROWS, 1.0) * (seen - self._recent[index])
            self._restart_if_contradicted(index, rows)
            above = rates[index]
        self._expected = [0.0]
        if self._linked is not None:
            self._linked._expected = [0.0]

    def uncertainty(self, depth: int) -> float:
        """Return the standard deviation of the logarithm of the tokens per step and row."""
        expected = self.expected_accepts(depth)
        tokens = 1.0 + expected[depth]
        above, variance = self._first, 0.0
        for index in range(depth):
            rate, weight = self._estimate(index, above)
            # Laplace's rule of succession: three rejections in a row don't prove that all follow
            cautious = (rate * weight + 1.0) / (weight + 2.0)
            deeper = (expected[depth] - expected[index]) / max(rate, 0.05)
            variance += (deeper / tokens) ** 2 * cautious * (1.0 - cautious) / weight
            above = rate
        return math.sqrt(variance)

    def discount(self, share: float, most: float = math.inf) -> None:
        """Reduce the weight of what was observed to a share, and to `most` rows; keep the rates."""
        for index, weight in enumerate(self._weights):
            if weight > 0.0:
                self._weights[index] = max(min(weight * share, most), _LEAST_WEIGHT)
        self._expected = [0.0]

    def _restart_if_contradicted(self, index: int, rows: float) -> None:
        if rows > _MOST_ROWS or self._weights[index] <= _RECENT_ROWS:
            return
        # the effective sample size of the exponential mean over recent rows
        few = 2.0 * _RECENT_ROWS - rows
        cautious = (self._rates[index] * few + 1.0) / (few + 2.0)
        deviation = math.sqrt(cautious * (1.0 - cautious) / few)
        if abs(self._recent[index] - self._rates[index]) > _CONTRADICTION * deviation:
            self._rates[index], self._weights[index] = self._recent[index], _RECENT_ROWS

    def _estimate(self, index: int, above: float) -> tuple[float, float]:
        """Return a depth's rate, drawn towards its prior, and the weight of both in rows."""
        linked = self._linked
        if linked is not None and self._weights[index] == 0.0:
            known = index < len(linked._weights) and linked._weights[index] > 0.0
            above = linked._rates[index] if known else above
        weight = self._weights[index] + _PRIOR_ROWS
        return (self._rates[index] * self._weights[index] + above * _PRIOR_ROWS) / weight, weight

    def _extend(self, depth: int) -> None:
        missing = [0.0] * (depth - len(self._rates))
        self._rates += missing
        self._recent += missing
        self._weights += missing
        above, survival, total = self._first, 1.0, 0.0
        self._expected = [0.0]
        for index in range(len(self._rates)):
            above, _ = self._estimate(index, above)
            survival *= above
            total += survival
            self._expected.append(total)
