"""Estimate what a decode step costs without speculation, by its number of rows.

Costs are known at knots, the powers of two, and linear between them. Control runs measure means
over the batch sizes that they met, and neighbouring knots inform each other: twice the rows take
between the same time and twice as long. Runs beside a worker that trained the drafter share one
factor. The estimate is the mode of the posterior of the costs' logarithms, by Gauss-Newton.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec

from tlt.policies.student_quantile import student_quantile

# control runs, and seconds of steps, by knot: fractions of a step count for both neighbours
StepsByKnot = Mapping[int, float]

# the logarithm of the cost rises by a uniform share of ln 2 from one knot to the next
_RISE, _RISE_DEVIATION = 0.5 * math.log(2.0), math.log(2.0) / math.sqrt(12.0)
# logarithm of the factor beside a worker that trains: a tenth where they share a cache, or nothing
_BESIDE, _BESIDE_DEVIATION = 0.03, 0.05
# deviation of the common level, which is unknown before any control run
_LEVEL_DEVIATION = 10.0
_ITERATIONS = 6
# standard deviations of a normal variable that hold 95 %
_Z = 1.959964


class ControlSums(msgspec.Struct, frozen=True, array_like=True):
    """Sums over the control runs of one bucket of batch sizes, either beside training or not."""

    runs: int = 0
    steps: float = 0.0
    rows: float = 0.0
    seconds: float = 0.0
    # of each run's steps and seconds
    steps_squared: float = 0.0
    seconds_squared: float = 0.0
    product: float = 0.0

    def plus(self, other: "ControlSums") -> "ControlSums":
        mine, others = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return ControlSums(*(a + b for a, b in zip(mine, others, strict=True)))


# by bucket of batch sizes, and whether a worker trained meanwhile
ControlRunSums = Mapping[tuple[int, bool], ControlSums]


class SavingsInterval(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds and their 95 % interval."""

    seconds: float
    low: float
    high: float


class PlainStepCosts:
    def __init__(
        self, knots: Sequence[int], logs: Sequence[float], covariance: list[list[float]], t: float
    ) -> None:
        self._index = {knot: index for index, knot in enumerate(knots)}
        self._largest = knots[-1]
        self._logs = logs
        self._covariance = covariance
        self._t = t

    def seconds(self, rows: float) -> float:
        """Return the seconds of a step with this many rows."""
        return sum(share * self._at(knot) for knot, share in knots_of(rows).items())

    def saving(self, steps: StepsByKnot, spent: float) -> SavingsInterval:
        """Return the seconds of plain steps beyond those that were spent."""
        gradient = [0.0] * len(self._logs)
        beyond = 0.0
        for knot, count in steps.items():
            seconds = count * self._at(knot)
            gradient[self._index[min(knot, self._largest)]] += seconds
            octaves = max(0.0, math.log2(knot / self._largest))
            beyond += octaves * (seconds * _RISE_DEVIATION) ** 2
        variance = beyond + _quadratic(gradient, self._covariance)
        saved = sum(gradient) - spent
        wide = self._t * math.sqrt(max(0.0, variance))
        return SavingsInterval(seconds=saved, low=saved - wide, high=saved + wide)

    def _at(self, knot: int) -> float:
        octaves = max(0.0, math.log2(knot / self._largest))
        return math.exp(self._logs[self._index[min(knot, self._largest)]] + octaves * _RISE)


def knots_of(rows: float) -> dict[int, float]:
    """Return the shares of the knots between which this number of rows lies."""
    below = 1 << (max(1, int(rows)).bit_length() - 1)
    share = max(0.0, rows / below - 1.0)
    return {below: 1.0 - share, 2 * below: share} if share > 0.0 else {below: 1.0}


def add_steps(sums: StepsByKnot, more: StepsByKnot) -> dict[int, float]:
    after = dict(sums)
    for knot, steps in more.items():
        after[knot] = after.get(knot, 0.0) + steps
    return after


def fit_plain_step_costs(controls: ControlRunSums) -> PlainStepCosts | None:
    """Return None until the spread of control runs is known, because that takes two in a bucket."""
    known = {key: sums for key, sums in controls.items() if sums.runs > 0 and sums.seconds > 0.0}
    freedom = sum(sums.runs - 1 for sums in known.values())
    if freedom < 1:
        return None
    spread = _relative_variance(known.values())
    means = [_Mean.of(sums, beside, spread) for (_, beside), sums in sorted(known.items())]
    most = max(max(mean.knots) for mean in means)
    knots = [1 << octave for octave in range(most.bit_length())]
    level = math.log(means[0].seconds)
    unknowns = [level + (octave - 0.5 * len(knots)) * _RISE for octave in range(len(knots))]
    unknowns.append(_BESIDE)
    covariance: list[list[float]] = []
    for _ in range(_ITERATIONS):
        precision, target = _prior(len(knots), level, unknowns)
        for mean in means:
            mean.inform(precision, target, unknowns)
        covariance = _inverse(precision)
        unknowns = [
            unknown + sum(c * t for c, t in zip(row, target, strict=True))
            for unknown, row in zip(unknowns, covariance, strict=True)
        ]
    costs = [row[:-1] for row in covariance[:-1]]
    return PlainStepCosts(knots, unknowns[:-1], costs, _t_quantile(freedom))


class _Mean(msgspec.Struct, frozen=True):
    """The mean seconds of the steps of some control runs."""

    seconds: float
    # relative
    variance: float
    knots: dict[int, float]
    beside: bool

    @classmethod
    def of(cls, sums: ControlSums, beside: bool, spread: float) -> "_Mean":
        share = sums.steps_squared / sums.steps**2
        return cls(
            sums.seconds / sums.steps, spread * share, knots_of(sums.rows / sums.steps), beside
        )

    def inform(
        self, precision: list[list[float]], target: list[float], unknowns: Sequence[float]
    ) -> None:
        """Add what this mean says about the unknowns, linear about their present values."""
        parts = {
            knot.bit_length() - 1: share * math.exp(unknowns[knot.bit_length() - 1])
            for knot, share in self.knots.items()
        }
        expected = sum(parts.values())
        gradient = {index: part / expected for index, part in parts.items()}
        error = math.log(self.seconds / expected)
        if self.beside:
            gradient[len(unknowns) - 1] = 1.0
            error -= unknowns[-1]
        weight = 1.0 / max(self.variance, 1e-9)
        for i, a in gradient.items():
            target[i] += weight * a * error
            for j, b in gradient.items():
                precision[i][j] += weight * a * b


def _prior(
    knots: int, level: float, unknowns: Sequence[float]
) -> tuple[list[list[float]], list[float]]:
    precision = [[0.0] * (knots + 1) for _ in range(knots + 1)]
    target = [0.0] * (knots + 1)
    means = (0, level, _LEVEL_DEVIATION), (knots, _BESIDE, _BESIDE_DEVIATION)
    for index, mean, deviation in means:
        precision[index][index] += deviation**-2
        target[index] += deviation**-2 * (mean - unknowns[index])
    weight = _RISE_DEVIATION**-2
    for low, high in pairwise(range(knots)):
        error = _RISE - (unknowns[high] - unknowns[low])
        precision[low][low] += weight
        precision[high][high] += weight
        precision[low][high] -= weight
        precision[high][low] -= weight
        target[high] += weight * error
        target[low] -= weight * error
    return precision, target


def _inverse(matrix: list[list[float]]) -> list[list[float]]:
    """Invert a positive definite matrix by elimination, which needs no pivots."""
    size = len(matrix)
    rows = [row[:] + [float(i == j) for j in range(size)] for i, row in enumerate(matrix)]
    for i in range(size):
        pivot = rows[i][i]
        rows[i] = [value / pivot for value in rows[i]]
        for j in range(size):
            if j != i and (factor := rows[j][i]) != 0.0:
                rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    return [row[size:] for row in rows]


def _quadratic(vector: Sequence[float], matrix: Sequence[Sequence[float]]) -> float:
    return sum(
        a * sum(m * b for m, b in zip(row, vector, strict=True))
        for a, row in zip(vector, matrix, strict=True)
    )


def _relative_variance(known: Iterable[ControlSums]) -> float:
    """Return the variance of a run's seconds, relative to the mean for its steps."""
    squares = expected = 0.0
    for sums in known:
        mean = sums.seconds / sums.steps
        residual = sums.seconds_squared / mean**2 - 2.0 * sums.product / mean
        squares += max(0.0, residual + sums.steps_squared)
        # the mean comes from the same runs
        own = sums.steps_squared / sums.steps**2
        expected += sums.steps_squared * (1.0 - min(own, 1.0))
    return squares / expected if expected > 0.0 else 0.0


def _t_quantile(degrees_of_freedom: int) -> float:
    """Return Student's t at 97.5 %."""
    if degrees_of_freedom < 3:
        return (12.7062, 4.3027)[degrees_of_freedom - 1]
    return student_quantile(_Z, degrees_of_freedom)
