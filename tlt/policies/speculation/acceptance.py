"""Estimate how many drafts are accepted, depth by depth, from counts of recent rows.

A rate is conditional: of the rows whose earlier drafts were all accepted, the share that accepts
the next one. A depth without data is assumed to accept like the one above it.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

# steps that a rate remembers where a step has many rows
_MEMORY_STEPS = 8.0
# rows that the depth above counts for, as the prior of the next
_PRIOR_ROWS = 4.0
# rows that old observations count for at least
_LEAST_WEIGHT = 1.0


class AcceptancePrior(NamedTuple):
    # rate at depth 1
    first: float
    # rows that a rate remembers, and decode steps in which they lose half of their weight
    memory: float
    half_life: float


class Acceptance:
    def __init__(self, prior: AcceptancePrior) -> None:
        self._prior = prior
        self._rates: list[float] = []
        self._weights: list[float] = []

    def observe(self, reached: Sequence[int], accepted: Sequence[int]) -> None:
        """Learn from counts as `StepObservation` defines them, summed over a run."""
        if not reached or reached[0] <= 0:
            return
        memory = max(self._prior.memory, _MEMORY_STEPS * reached[0])
        above = self._prior.first
        for depth, (rows, hits) in enumerate(zip(reached, accepted, strict=True)):
            if rows <= 0:
                break
            if depth == len(self._rates):
                self._rates.append(above)
                self._weights.append(_PRIOR_ROWS)
            weight = self._weights[depth] = min(self._weights[depth] + rows, memory)
            rate = self._rates[depth]
            self._rates[depth] = above = rate + min(rows / weight, 1.0) * (hits / rows - rate)

    def expected_accepts(self, depth: int) -> list[float]:
        """Return, at index d, how many of d drafts a row accepts."""
        expected, survival = [0.0], 1.0
        for rate, _ in self._estimates(depth):
            survival *= rate
            expected.append(expected[-1] + survival)
        return expected

    def uncertainty(self, expected: Sequence[float], depth: int) -> float:
        """Return the standard deviation of the logarithm of the tokens per step and row."""
        variance, deeper = 0.0, 0.0
        estimates = self._estimates(depth)
        for index in reversed(range(depth)):
            rate, weight = estimates[index]
            # tokens that a row gains by accepting this draft, and the probability to get so far
            gain = 1.0 + deeper
            reaches = expected[index] - expected[index - 1] if index else 1.0
            # Laplace's rule of succession: a few rejections don't prove that all follow
            cautious = (rate * weight + 1.0) / (weight + 2.0)
            variance += (reaches * gain) ** 2 * cautious * (1.0 - cautious) / weight
            deeper = rate * gain
        return math.sqrt(variance) / (1.0 + expected[depth])

    def _estimates(self, depth: int) -> list[tuple[float, float]]:
        """Return each depth's rate, and its weight in rows."""
        known = list(zip(self._rates[:depth], self._weights, strict=False))
        above = known[-1][0] if known else self._prior.first
        return known + [(above, _PRIOR_ROWS)] * (depth - len(known))

    def age(self, steps: int) -> None:
        share = 0.5 ** (steps / self._prior.half_life)
        self._weights = [max(weight * share, _LEAST_WEIGHT) for weight in self._weights]

    def limit_weight(self, most: float) -> None:
        self._weights = [min(weight, most) for weight in self._weights]
