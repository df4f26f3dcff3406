"""What a round costs: a pass over so many tokens, and the drafting before it as a share of one.

Seconds are a sum of positive parts, so a prediction is positive whatever was observed. One
surprise is shared out among the parts, the neighbourhood of this batch size and the arm itself,
each in proportion to how doubtful it is (an extended Kalman filter in the logarithm of the
seconds; between the three, correlations are neglected). A machine that is slower for a while
moves all parts together, so it makes no arm look better than another.
"""

import math
from operator import mul, sub

# of [1, sqrt(batch), batch, drafted * batch, context]: the share in a plain step of one row
_FIRST_GUESS = (0.4, 0.3, 0.1, 0.05, 3e-5)
_PARTS = len(_FIRST_GUESS)
_FIRST_SECONDS = 0.005
_PART_VARIANCES = (1.0, 1.0, 1.0, 1.0, 4.0)
_SCALE_VARIANCE = 4.0
# the context costs more with each drafted token, by this share: it is read once for all of them
_CONTEXT_AGAIN = 0.2
# per observation: the machine's speed drifts, and the parts against each other, slowly
_SCALE_DRIFT = 2e-4
_PART_DRIFT = 1e-6

_KNOTS = 12
_KNOT_VARIANCE = 0.02
_LEAST_VARIANCE = 2e-4

# beyond so many standard deviations a timing says no more than that it was slow
_SURPRISE = 2.0
_FIRST_SPREAD = 0.1
_SPREAD_LIMITS = (0.01, 0.4)
_SPREAD_STEP = 0.02
# a median's variance against a mean's
_MEDIAN = 1.5
_SECONDS_LIMITS = (1e-6, 1e4)
_LOG_LIMITS = (-35.0, 12.0)


class BatchPoint:
    """A batch and a context: between which knots, how near to the upper one, and what passes cost.

    Seconds without drafts, for each drafted token, and the logarithm of a factor on both.
    """

    __slots__ = ("base", "each", "factor", "knot", "upper")

    def __init__(self, knot: int, upper: float, base: float, each: float, factor: float) -> None:
        self.knot = knot
        self.upper = upper
        self.base = base
        self.each = each
        self.factor = factor


class BatchSizeCorrection:
    """A factor (its logarithm) along the batch sizes, between knots at the powers of two."""

    __slots__ = ("_values", "_variances")

    def __init__(self) -> None:
        self._values = [0.0] * _KNOTS
        self._variances = [_KNOT_VARIANCE] * _KNOTS

    def at(self, knot: int, upper: float) -> float:
        below = self._values[knot]
        return below + upper * (self._values[knot + 1] - below)

    def variance(self, knot: int, upper: float) -> float:
        lower = 1.0 - upper
        variances = self._variances
        return lower * lower * variances[knot] + upper * upper * variances[knot + 1]

    def learn(self, knot: int, upper: float, surprise: float, expected: float) -> None:
        """`surprise` in units of `expected`, the variance that was expected of it."""
        values, variances = self._values, self._variances
        for index, weight in ((knot, 1.0 - upper), (knot + 1, upper)):
            moved = variances[index] * weight
            values[index] += moved * surprise
            variances[index] = max(variances[index] - moved * moved / expected, _LEAST_VARIANCE)


class TimingSpread:
    """How far timings lie from what was expected of them: the median, which outliers don't move."""

    __slots__ = ("_spread",)

    def __init__(self) -> None:
        self._spread = _FIRST_SPREAD

    def variance(self, rounds: int) -> float:
        return (1.5 * self._spread) ** 2 * _MEDIAN / rounds

    def learn(self, error: float, rounds: int) -> None:
        lowest, highest = _SPREAD_LIMITS
        wider = abs(error) * math.sqrt(rounds) > self._spread
        spread = self._spread * (1.0 + _SPREAD_STEP if wider else 1.0 - _SPREAD_STEP)
        self._spread = min(max(spread, lowest), highest)


class PassCost:
    """A forward pass of the policy over 1 + `drafted` tokens of every row."""

    def __init__(self) -> None:
        self._logs = [math.log(share * _FIRST_SECONDS) for share in _FIRST_GUESS]
        self._rates = [math.exp(log) for log in self._logs]
        self._covariance = [
            [_SCALE_VARIANCE + (_PART_VARIANCES[i] if i == j else 0.0) for j in range(_PARTS)]
            for i in range(_PARTS)
        ]
        self._shared = BatchSizeCorrection()
        self._noise = TimingSpread()

    def at(self, batch: int, context: int) -> BatchPoint:
        one, root, row, token, word = self._rates
        base = one + root * math.sqrt(batch) + row * batch + word * context
        each = token * batch + word * _CONTEXT_AGAIN * context
        knot, upper = _position(batch)
        return BatchPoint(knot, upper, base, each, self._shared.at(knot, upper))

    def doubt(self, batch: int, context: int, drafted: int, own: BatchSizeCorrection) -> float:
        """The variance of the logarithm of the seconds, against a pass without drafts."""
        drafting = self._shares(batch, context, drafted)
        apart = list(map(sub, drafting, self._shares(batch, context, 0)))
        parts = _dot(apart, [_dot(row, apart) for row in self._covariance])
        return max(parts, 0.0) + own.variance(*_position(batch))

    def observe(
        self,
        batch: int,
        context: int,
        drafted: int,
        own: BatchSizeCorrection,
        seconds: float,
        rounds: int,
    ) -> None:
        """`seconds`: the median of so many rounds."""
        place = self.at(batch, context)
        knot, upper = place.knot, place.upper
        shares = self._shares(batch, context, drafted)
        spread = [_dot(row, shares) for row in self._covariance]
        variance = (
            max(_dot(shares, spread), 0.0)
            + self._shared.variance(knot, upper)
            + own.variance(knot, upper)
            + self._noise.variance(rounds)
        )
        expected = math.log(pass_seconds(place, drafted, own))
        error = _log(seconds) - expected
        surprise = _bounded(error, variance) / variance
        self._learn(spread, surprise, variance)
        self._shared.learn(knot, upper, surprise, variance)
        own.learn(knot, upper, surprise, variance)
        self._noise.learn(error, rounds)

    def _shares(self, batch: int, context: int, drafted: int) -> list[float]:
        """What part of the seconds each of the parts is."""
        one, root, row, token, word = self._rates
        parts = [
            one,
            root * math.sqrt(batch),
            row * batch,
            token * batch * drafted,
            word * context * (1.0 + _CONTEXT_AGAIN * drafted),
        ]
        whole = sum(parts)
        return [part / whole for part in parts]

    def _learn(self, spread: list[float], surprise: float, variance: float) -> None:
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


class ProposalCost:
    """A drafted token, as a share of a plain step at the same batch and context."""

    def __init__(self, share: float) -> None:
        self._log = math.log(share)
        self._variance = _SCALE_VARIANCE
        self._shared = BatchSizeCorrection()
        self._noise = TimingSpread()

    def at(self, place: BatchPoint) -> float:
        """Seconds for each token, the arm's own correction aside."""
        factor = place.factor + self._log + self._shared.at(place.knot, place.upper)
        return place.base * math.exp(factor)

    def seconds(self, place: BatchPoint, drafted: int, own: BatchSizeCorrection) -> float:
        return drafted * self.at(place) * math.exp(own.at(place.knot, place.upper))

    def observe(
        self, place: BatchPoint, drafted: int, own: BatchSizeCorrection, seconds: float, rounds: int
    ) -> None:
        knot, upper = place.knot, place.upper
        error = _log(seconds) - math.log(self.seconds(place, drafted, own))
        variance = (
            self._variance
            + self._shared.variance(knot, upper)
            + own.variance(knot, upper)
            + self._noise.variance(rounds)
        )
        surprise = _bounded(error, variance) / variance
        lowest, highest = _LOG_LIMITS
        self._log = min(max(self._log + self._variance * surprise, lowest), highest)
        kept = self._variance - self._variance * self._variance / variance
        self._variance = max(kept, _LEAST_VARIANCE)
        self._shared.learn(knot, upper, surprise, variance)
        own.learn(knot, upper, surprise, variance)
        self._noise.learn(error, rounds)


def pass_seconds(place: BatchPoint, drafted: int, own: BatchSizeCorrection) -> float:
    factor = place.factor + own.at(place.knot, place.upper)
    return (place.base + place.each * drafted) * math.exp(factor)


def _position(batch: int) -> tuple[int, float]:
    place = min(math.log2(batch), _KNOTS - 1.001) if batch > 1 else 0.0
    knot = int(place)
    return knot, place - knot


def _dot(left: list[float], right: list[float]) -> float:
    return sum(map(mul, left, right))


def _log(seconds: float) -> float:
    least, most = _SECONDS_LIMITS
    return math.log(min(max(seconds, least), most))


def _bounded(error: float, variance: float) -> float:
    limit = _SURPRISE * math.sqrt(variance)
    return min(max(error, -limit), limit)
