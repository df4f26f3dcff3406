"""Slopes of what a soak has sampled: within a process's life, pooled over the lives of a role.

The intervals come from resampling whole jobs, or minutes of short ones, within which samples are
alike.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

_RESAMPLES = 1000
_CUTS = (2.5, 97.5)


class Point(NamedTuple):
    # of one process; a process that was started again has another
    life: int
    # number of the job, or of the minute of several
    job: int
    minute: float
    value: float


class Slope(NamedTuple):
    # a minute, with its 95 % interval
    value: float
    low: float
    high: float
    lives: int
    points: int
    # the mean of all points
    mean: float


def fit_slope(points: Sequence[Point], seed: int) -> Slope | None:
    """Return None if no life is long enough."""
    if not points:
        return None
    lives = _numbered([point.life for point in points])
    jobs = _numbered([point.job for point in points])
    minutes = numpy.array([point.minute for point in points])
    values = numpy.array([point.value for point in points])
    ones = numpy.ones(len(points))
    whole = _slope(lives, minutes, values, ones)
    if whole is None:
        return None
    random = numpy.random.default_rng(seed)
    number = int(jobs.max()) + 1
    found = [
        _slope(lives, minutes, values, numpy.bincount(drawn, minlength=number)[jobs].astype(float))
        for drawn in random.integers(0, number, (_RESAMPLES, number))
    ]
    low, high = numpy.percentile([slope for slope in found if slope is not None], _CUTS)
    return Slope(
        value=whole,
        low=float(low),
        high=float(high),
        lives=int(lives.max()) + 1,
        points=len(points),
        mean=float(values.mean()),
    )


def _slope(
    lives: NDArray[Any], minutes: NDArray[Any], values: NDArray[Any], weights: NDArray[Any]
) -> float | None:
    """Return the slope of a line with an intercept of its own for each life."""
    each = numpy.bincount(lives, weights)
    safe = numpy.where(each > 0, each, 1.0)
    minutes = minutes - (numpy.bincount(lives, weights * minutes) / safe)[lives]
    values = values - (numpy.bincount(lives, weights * values) / safe)[lives]
    spread = float((weights * minutes * minutes).sum())
    return float((weights * minutes * values).sum()) / spread if spread > 0 else None


def _numbered(names: Sequence[int]) -> NDArray[Any]:
    return numpy.unique(numpy.array(names), return_inverse=True)[1]
