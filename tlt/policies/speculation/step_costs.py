"""Predict what a decode step costs: a pass over some tokens, and proposing.

The seconds of a pass are a sum of positive parts, so a prediction is positive whatever was
observed. An error is shared out among the parts in proportion to their uncertainty (an extended
Kalman filter in the logarithm of the seconds); a part of what remains is learnt as a correction for
this number of drafts at this batch size. A machine that is slow for a while moves all parts
together, so it favours no strategy over another.
"""

import math
from operator import mul

from tlt.policies.speculation.strategy_policy import bucket_of

# of [1, sqrt(batch), batch, drafts * batch, context]: the share in a plain step of one row
_FIRST_GUESS = (0.4, 0.3, 0.1, 0.05, 3e-5)
_FIRST_SECONDS = 0.005
# variances of the logarithms: of each part, and of their common scale
_PART_VARIANCES, _SCALE_VARIANCE = (1.0, 1.0, 1.0, 1.0, 4.0), 4.0
# variance added per observation, as the machine's speed drifts and, slowly, the parts' shares
_SCALE_DRIFT, _PART_DRIFT = 2e-4, 1e-6
# each draft raises the cost of the context by this share, because all of them share one read
_CONTEXT_PER_DRAFT = 0.2
# standard deviations of what the parts don't explain and of one step's timing
_UNEXPLAINED, _TIMING = 0.1, 0.15
# share of an unexplained error that a correction takes on
_CORRECTED = 0.1
# errors are cut off at this many standard deviations
_MOST_DEVIATIONS = 2.0
_LOG_LIMITS, _SECONDS_LIMITS = (-35.0, 12.0), (1e-6, 1e4)
# weights of the first mean of proposal seconds and of later ones, and the most that a mean counts
# for, in expected times, because a proposal may have been interrupted
_FIRST_PROPOSAL, _NEW_PROPOSAL, _MOST_TIMES = 0.8, 0.3, 4.0


class PassCost:
    def __init__(self) -> None:
        self._logs = [math.log(share * _FIRST_SECONDS) for share in _FIRST_GUESS]
        self._covariance = [
            [_SCALE_VARIANCE + (own if i == j else 0.0) for j in range(len(_FIRST_GUESS))]
            for i, own in enumerate(_PART_VARIANCES)
        ]
        # logarithms of factors, by drafts and bucket of batch sizes
        self._corrections: dict[tuple[int, int], float] = {}

    def seconds(self, batch: float, context: float, drafts: int) -> float:
        correction = self._corrections.get((drafts, bucket_of(batch)), 0.0)
        return sum(self._parts(batch, context, drafts)) * math.exp(correction)

    def uncertainty(self, batch: float, context: float, drafts: int) -> float:
        """Return the standard deviation of the logarithm of the seconds, against a plain pass."""
        plain = self._shares(batch, context, 0)
        apart = [a - b for a, b in zip(self._shares(batch, context, drafts), plain, strict=True)]
        return math.sqrt(max(_dot(apart, [_dot(row, apart) for row in self._covariance]), 0.0))

    def observe(
        self, batch: float, context: float, drafts: int, seconds: float, steps: int
    ) -> None:
        """Learn from the mean `seconds` of some steps."""
        least, most = _SECONDS_LIMITS
        seen = math.log(min(max(seconds, least), most))
        error = seen - math.log(self.seconds(batch, context, drafts))
        shares = self._shares(batch, context, drafts)
        spread = [_dot(row, shares) for row in self._covariance]
        variance = max(_dot(shares, spread), 0.0) + _UNEXPLAINED**2 + _TIMING**2 / steps
        limit = _MOST_DEVIATIONS * math.sqrt(variance)
        error = min(max(error, -limit), limit)
        lowest, highest = _LOG_LIMITS
        for index, moved in enumerate(spread):
            self._logs[index] = min(
                max(self._logs[index] + moved * error / variance, lowest), highest
            )
            row = self._covariance[index]
            for other, known in enumerate(row):
                row[other] = known - moved * spread[other] / variance + _SCALE_DRIFT
            row[index] += _PART_DRIFT
        key = drafts, bucket_of(batch)
        unexplained = error * (_UNEXPLAINED**2 + _TIMING**2 / steps) / variance
        self._corrections[key] = self._corrections.get(key, 0.0) + _CORRECTED * unexplained

    def _shares(self, batch: float, context: float, drafts: int) -> list[float]:
        parts = self._parts(batch, context, drafts)
        whole = sum(parts)
        return [part / whole for part in parts]

    def _parts(self, batch: float, context: float, drafts: int) -> list[float]:
        one, root, row, token, word = map(math.exp, self._logs)
        return [
            one,
            root * math.sqrt(batch),
            row * batch,
            token * batch * drafts,
            word * context * (1.0 + _CONTEXT_PER_DRAFT * drafts),
        ]


class ProposalCost:
    """The cost of a proposal, by batch size, as a share of a plain step."""

    def __init__(self, first: float) -> None:
        self._first = first
        self._shares: dict[int, float] = {}

    def share(self, batch: float) -> float:
        bucket = bucket_of(batch)
        if bucket in self._shares:
            return self._shares[bucket]
        nearest = min(self._shares, key=lambda other: abs(math.log(other / bucket)), default=None)
        return self._first if nearest is None else self._shares[nearest]

    def observe(self, batch: float, share: float) -> None:
        if 0.0 <= share < math.inf:
            bucket = bucket_of(batch)
            weight = _NEW_PROPOSAL if bucket in self._shares else _FIRST_PROPOSAL
            known = self.share(batch)
            self._shares[bucket] = known + weight * (min(share, _MOST_TIMES * known) - known)


def _dot(left: list[float], right: list[float]) -> float:
    return sum(map(mul, left, right))
