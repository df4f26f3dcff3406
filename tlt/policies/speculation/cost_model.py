"""Predict what a decode step costs: a pass over some tokens, and proposing as a share of one.

Seconds are a sum of positive parts, so a prediction is positive whatever was observed. A prediction
error is shared out among the parts, the neighbourhood of the batch size and the strategy itself,
each in proportion to its uncertainty (an extended Kalman filter in the logarithm of the seconds;
correlations between the three are neglected). A machine that is slow for a while moves all parts
together, so it favours no strategy over another.
"""

import math
from operator import mul, sub
from typing import NamedTuple

# of [1, sqrt(batch), batch, drafts * batch, context]: the share in a plain step of one row
_FIRST_GUESS = (0.4, 0.3, 0.1, 0.05, 3e-5)
_PARTS = len(_FIRST_GUESS)
_FIRST_SECONDS = 0.005
_PART_VARIANCES = (1.0, 1.0, 1.0, 1.0, 4.0)
_SCALE_VARIANCE = 4.0
# each draft raises the cost of the context by this share, because all of them share one read
_CONTEXT_PER_DRAFT = 0.2
# variance added per observation, as the machine's speed drifts and, slowly, the parts' shares
_SCALE_DRIFT = 2e-4
_PART_DRIFT = 1e-6

_KNOTS = 12
_KNOT_VARIANCE = 0.02
_LEAST_VARIANCE = 2e-4

# errors are cut off at this many standard deviations
_ERROR_LIMIT = 2.0
_FIRST_SPREAD = 0.1
_SPREAD_LIMITS = (0.01, 0.4)
_SPREAD_STEP = 0.02
# the variance of a median against that of a mean
_MEDIAN = 1.5
_SECONDS_LIMITS = (1e-6, 1e4)
_LOG_LIMITS = (-35.0, 12.0)


class BatchPoint(NamedTuple):
    """A batch size and context, and what passes cost there.

    `base` is the seconds without drafts, `per_draft` those of each draft, and `log_factor` the
    logarithm of a correction of both.
    """

    batch: int
    context: int
    # the batch size lies at the share `upper` of the interval from this knot to the next
    knot: int
    upper: float
    base: float
    per_draft: float
    log_factor: float


class BatchSizeCorrection:
    """The logarithm of a factor, interpolated between knots at the powers of two."""

    __slots__ = ("_values", "_variances")

    def __init__(self) -> None:
        self._values = [0.0] * _KNOTS
        self._variances = [_KNOT_VARIANCE] * _KNOTS

    def log_factor(self, knot: int, upper: float) -> float:
        below = self._values[knot]
        return below + upper * (self._values[knot + 1] - below)

    def variance(self, point: BatchPoint) -> float:
        knot, upper = point.knot, point.upper
        lower = 1.0 - upper
        variances = self._variances
        return lower * lower * variances[knot] + upper * upper * variances[knot + 1]

    def learn(self, point: BatchPoint, surprise: float, expected: float) -> None:
        """Learn from an error: `surprise` is the error in units of its `expected` variance."""
        values, variances = self._values, self._variances
        for index, weight in ((point.knot, 1.0 - point.upper), (point.knot + 1, point.upper)):
            moved = variances[index] * weight
            values[index] += moved * surprise
            variances[index] = max(variances[index] - moved * moved / expected, _LEAST_VARIANCE)


class TimingSpread:
    """The median distance of timings from their predictions, which outliers don't move."""

    __slots__ = ("_spread",)

    def __init__(self) -> None:
        self._spread = _FIRST_SPREAD

    def variance(self, steps: int) -> float:
        return (1.5 * self._spread) ** 2 * _MEDIAN / steps

    def learn(self, error: float, steps: int) -> None:
        lowest, highest = _SPREAD_LIMITS
        wider = abs(error) * math.sqrt(steps) > self._spread
        spread = self._spread * (1.0 + _SPREAD_STEP if wider else 1.0 - _SPREAD_STEP)
        self._spread = min(max(spread, lowest), highest)


class _CorrectedCost:
    """A cost with a correction by batch size, shared by all strategies that have this cost."""

    def __init__(self) -> None:
        self._shared = BatchSizeCorrection()
        self._spread = TimingSpread()

    def _learn_corrections(
        self,
        point: BatchPoint,
        own: BatchSizeCorrection,
        error: float,
        variance: float,
        steps: int,
    ) -> tuple[float, float]:
        """Return the error in units of its variance, and that variance.

        `variance` is that of the cost's other parts.
        """
        variance = (
            variance
            + self._shared.variance(point)
            + own.variance(point)
            + self._spread.variance(steps)
        )
        limit = _ERROR_LIMIT * math.sqrt(variance)
        surprise = min(max(error, -limit), limit) / variance
        self._shared.learn(point, surprise, variance)
        own.learn(point, surprise, variance)
        self._spread.learn(error, steps)
        return surprise, variance


class PassCost(_CorrectedCost):
    """The cost of a forward pass of the policy over 1 + `drafts` tokens of every row."""

    def __init__(self) -> None:
        super().__init__()
        self._logs = [math.log(share * _FIRST_SECONDS) for share in _FIRST_GUESS]
        self._rates = [math.exp(log) for log in self._logs]
        self._covariance = [
            [_SCALE_VARIANCE + (_PART_VARIANCES[i] if i == j else 0.0) for j in range(_PARTS)]
            for i in range(_PARTS)
        ]

    def at(self, batch: int, context: int) -> BatchPoint:
        one, root, row, token, word = self._rates
        base = one + root * math.sqrt(batch) + row * batch + word * context
        per_draft = token * batch + word * _CONTEXT_PER_DRAFT * context
        position = min(math.log2(batch), _KNOTS - 1.001) if batch > 1 else 0.0
        knot = int(position)
        upper = position - knot
        log_factor = self._shared.log_factor(knot, upper)
        return BatchPoint(batch, context, knot, upper, base, per_draft, log_factor)

    def uncertainty(self, point: BatchPoint, drafts: int, own: BatchSizeCorrection) -> float:
        """Return the variance of the logarithm of the seconds, against a pass without drafts."""
        shares = self._shares(point, drafts)
        apart = list(map(sub, shares, self._shares(point, 0)))
        parts = _dot(apart, [_dot(row, apart) for row in self._covariance])
        return max(parts, 0.0) + own.variance(point)

    def observe(
        self, point: BatchPoint, drafts: int, own: BatchSizeCorrection, seconds: float, steps: int
    ) -> None:
        """Learn from the median `seconds` of some steps."""
        shares = self._shares(point, drafts)
        spread = [_dot(row, shares) for row in self._covariance]
        error = _log(seconds) - math.log(pass_seconds(point, drafts, own))
        parts = max(_dot(shares, spread), 0.0)
        surprise, variance = self._learn_corrections(point, own, error, parts, steps)
        lowest, highest = _LOG_LIMITS
        for index, moved in enumerate(spread):
            log = min(max(self._logs[index] + moved * surprise, lowest), highest)
            self._logs[index] = log
            self._rates[index] = math.exp(log)
            share = moved / variance
            row = self._covariance[index]
            row[:] = [
                known - share * other + _SCALE_DRIFT
                for known, other in zip(row, spread, strict=True)
            ]
            row[index] += _PART_DRIFT

    def _shares(self, point: BatchPoint, drafts: int) -> list[float]:
        """Return the share of each part in the seconds."""
        one, root, row, token, word = self._rates
        parts = [
            one,
            root * math.sqrt(point.batch),
            row * point.batch,
            token * point.batch * drafts,
            word * point.context * (1.0 + _CONTEXT_PER_DRAFT * drafts),
        ]
        whole = sum(parts)
        return [part / whole for part in parts]


class ProposalCost(_CorrectedCost):
    """The cost of proposing one draft, as a share of a plain step at the same point."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self._log = math.log(share)
        self._variance = _SCALE_VARIANCE

    def at(self, point: BatchPoint) -> float:
        """Return the seconds per draft, before the strategy's own correction."""
        shared = self._shared.log_factor(point.knot, point.upper)
        return point.base * math.exp(point.log_factor + self._log + shared)

    def seconds(self, point: BatchPoint, drafts: int, own: BatchSizeCorrection) -> float:
        return drafts * self.at(point) * math.exp(own.log_factor(point.knot, point.upper))

    def observe(
        self, point: BatchPoint, drafts: int, own: BatchSizeCorrection, seconds: float, steps: int
    ) -> None:
        """Learn from the median `seconds` of some steps."""
        error = _log(seconds) - math.log(self.seconds(point, drafts, own))
        surprise, variance = self._learn_corrections(point, own, error, self._variance, steps)
        lowest, highest = _LOG_LIMITS
        self._log = min(max(self._log + self._variance * surprise, lowest), highest)
        left = self._variance - self._variance * self._variance / variance
        self._variance = max(left, _LEAST_VARIANCE)


def pass_seconds(point: BatchPoint, drafts: int, own: BatchSizeCorrection) -> float:
    log_factor = point.log_factor + own.log_factor(point.knot, point.upper)
    return (point.base + point.per_draft * drafts) * math.exp(log_factor)


def _dot(left: list[float], right: list[float]) -> float:
    return sum(map(mul, left, right))


def _log(seconds: float) -> float:
    least, most = _SECONDS_LIMITS
    return math.log(min(max(seconds, least), most))
