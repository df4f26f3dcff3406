"""Compare two policies by their answers to the same held-out prompts.

Prompts differ far more than policies do, so the difference on each prompt is known much better
than either mean. The mean difference is that over sets, each of which counts the same.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

import msgspec

from tlt.policies.run.evaluation_answers import PromptMeans
from tlt.policies.student_quantile import student_quantile


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The second policy's mean reward less that of the first."""

    value: float
    # None where a set has a single prompt, which says nothing of the others
    standard_error: float | None
    # degrees of freedom of the standard error, by Welch and Satterthwaite
    degrees: float = math.inf

    def low(self, confidence: float) -> float:
        """Return the one-sided bound that the true difference is above with this confidence."""
        if confidence == 0.5:
            return self.value
        if self.standard_error is None:
            return -math.inf
        if self.standard_error == 0.0:
            return self.value
        return self.value - _student(confidence, self.degrees) * self.standard_error

    def interval(self, confidence: float) -> tuple[float, float]:
        half = self.value - self.low((1.0 + confidence) / 2.0)
        return self.value - half, self.value + half


def compare(before: PromptMeans, after: PromptMeans) -> Difference | None:
    """Return None if they have no prompt in common on which both have a reward."""
    sets = [
        differences
        for name, means in after.items()
        if (differences := _differences(before.get(name, ()), means))
    ]
    if not sets:
        return None
    value = math.fsum(_mean(each) for each in sets) / len(sets)
    if any(len(each) < 2 for each in sets):
        return Difference(value=value, standard_error=None)
    variances = [_variance_of_mean(each) for each in sets]
    total = math.fsum(variances)
    squares = math.fsum(v * v / (len(each) - 1) for v, each in zip(variances, sets, strict=True))
    return Difference(
        value=value,
        standard_error=math.sqrt(total) / len(sets),
        degrees=total * total / squares if squares > 0.0 else math.inf,
    )


def _differences(before: Sequence[float | None], after: Sequence[float | None]) -> list[float]:
    both = zip(before, after, strict=False)
    return [new - old for old, new in both if old is not None and new is not None]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _variance_of_mean(values: Sequence[float]) -> float:
    middle = _mean(values)
    squares = math.fsum((value - middle) ** 2 for value in values)
    return squares / (len(values) - 1) / len(values)


def _student(probability: float, degrees: float) -> float:
    """Return the quantile of Student's t; exact at one and two degrees of freedom."""
    normal = NormalDist().inv_cdf(probability)
    if math.isinf(degrees):
        return normal
    if degrees < 2.0:
        return math.tan(math.pi * (probability - 0.5))
    if degrees < 3.0:
        centred = 2.0 * probability - 1.0
        return centred * math.sqrt(2.0 / (1.0 - centred * centred))
    return student_quantile(normal, degrees)
