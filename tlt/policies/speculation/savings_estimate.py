"""Estimate what speculation saved: the seconds its tokens would have taken without, less theirs.

Control runs show what a token takes without speculation, per bucket of batch sizes. The interval
follows from how much the runs differ: their spread is pooled over all buckets, as shares of each
bucket's mean. A bucket without a run borrows from the nearest one that has some: rows share a
step, so the token of a batch half as large takes as long, twice as long, or something between. All
seconds are rank seconds: two ranks that decode side by side spend two in one second.
"""

import math
from collections.abc import Iterable, Mapping

import msgspec

from tlt.protocol.shared_values import StrategyTally

# standard deviations of a normal variable that hold 95 %
_Z = 1.959964
# control runs before a loss is believed
_ENOUGH_RUNS = 8


class DecodeCost(msgspec.Struct, frozen=True, array_like=True):
    """Tokens and seconds of one bucket, with speculation and (`plain`) in control runs."""

    tokens: float = 0.0
    seconds: float = 0.0
    plain_tokens: float = 0.0
    plain_seconds: float = 0.0
    # control runs, and sums over them of the squares and the product of tokens and seconds
    runs: int = 0
    tokens_squared: float = 0.0
    seconds_squared: float = 0.0
    product: float = 0.0


CostsByBucket = Mapping[int, DecodeCost]


class SavingsInterval(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds and their 95 % interval, which is unknown until some bucket has two control runs."""

    seconds: float
    low: float | None
    high: float | None


class BucketSavings(msgspec.Struct, frozen=True, kw_only=True):
    bucket: int
    tokens: float
    seconds: float
    # seconds per token without speculation
    plain: float
    runs: int
    # the bucket whose control runs measured `plain`
    measured_at: int
    saved: SavingsInterval


class Savings(msgspec.Struct, frozen=True, kw_only=True):
    total: SavingsInterval
    buckets: tuple[BucketSavings, ...]
    runs: int
    # seconds of the control runs, and the seconds of them that speculation would have saved
    control_seconds: float
    control_cost: float


class _PlainRate(msgspec.Struct, frozen=True):
    """Seconds per token of one bucket, and the relative variance of this mean."""

    seconds: float
    variance: float


class PlainRates:
    """The seconds that a token takes without speculation, measured by control runs."""

    def __init__(self, costs: CostsByBucket) -> None:
        known = {bucket: cost for bucket, cost in costs.items() if cost.plain_tokens > 0}
        self._degrees_of_freedom = sum(cost.runs for cost in known.values()) - len(known)
        spread = _relative_variance(known.values())
        self._rates = {
            bucket: _PlainRate(
                cost.plain_seconds / cost.plain_tokens,
                spread * cost.tokens_squared / cost.plain_tokens**2,
            )
            for bucket, cost in known.items()
        }

    def __bool__(self) -> bool:
        """Return True if there are runs enough for an interval: nothing is claimed without one."""
        return self._degrees_of_freedom >= 1

    def measured_at(self, bucket: int) -> int:
        """Return the nearest bucket with control runs; of two at one distance, the smaller."""
        return min(self._rates, key=lambda other: (max(other, bucket) / min(other, bucket), other))

    def plain(self, bucket: int) -> float:
        """Return the seconds per token of a bucket."""
        source = self.measured_at(bucket)
        return self._rates[source].seconds * math.sqrt(source / bucket)

    def saving(self, costs: CostsByBucket) -> SavingsInterval:
        seconds = variance = 0.0
        # buckets that borrow from the same one share its error
        measured: dict[int, float] = {}
        for bucket, cost in costs.items():
            source = self.measured_at(bucket)
            plain = cost.tokens * self.plain(bucket)
            measured[source] = measured.get(source, 0.0) + plain
            # the logarithm is uniformly distributed between the two bounds
            variance += (plain * math.log(source / bucket)) ** 2 / 12.0
            seconds += plain - cost.seconds
        if self._degrees_of_freedom < 1:
            return SavingsInterval(seconds=seconds, low=None, high=None)
        variance += sum(plain**2 * self._rates[at].variance for at, plain in measured.items())
        wide = _t_quantile(self._degrees_of_freedom) * math.sqrt(variance)
        return SavingsInterval(seconds=seconds, low=seconds - wide, high=seconds + wide)


def add_tallies(costs: CostsByBucket, tallies: Iterable[StrategyTally]) -> dict[int, DecodeCost]:
    after = dict(costs)
    for tally in tallies:
        after[tally.bucket] = _add_tally(after.get(tally.bucket, DecodeCost()), tally)
    return after


def estimate_savings(costs: CostsByBucket) -> Savings | None:
    """Return None until some bucket has two control runs."""
    rates = PlainRates(costs)
    if not rates:
        return None
    return Savings(
        total=rates.saving(costs),
        buckets=tuple(
            BucketSavings(
                bucket=bucket,
                tokens=cost.tokens,
                seconds=cost.seconds,
                plain=rates.plain(bucket),
                runs=cost.runs,
                measured_at=rates.measured_at(bucket),
                saved=rates.saving({bucket: cost}),
            )
            for bucket, cost in sorted(costs.items())
        ),
        runs=sum(cost.runs for cost in costs.values()),
        control_seconds=sum(cost.plain_seconds for cost in costs.values()),
        control_cost=sum(map(_control_cost, costs.values())),
    )


def estimate_speedup(costs: CostsByBucket) -> float | None:
    """Return the speed of decoding against plain decoding, in buckets that have control runs."""
    rates = PlainRates(costs)
    known = {bucket: cost for bucket, cost in costs.items() if cost.plain_tokens > 0}
    seconds = math.fsum(cost.seconds for cost in known.values())
    plain = math.fsum(cost.tokens * rates.plain(bucket) for bucket, cost in known.items())
    return plain / seconds if plain > 0.0 and seconds > 0.0 else None


def estimate_loss(costs: CostsByBucket) -> SavingsInterval | None:
    """Return the savings of speculation if their whole interval is negative."""
    if sum(cost.runs for cost in costs.values()) < _ENOUGH_RUNS:
        return None
    saving = PlainRates(costs).saving(costs)
    return saving if saving.high is not None and saving.high < 0.0 else None


def _add_tally(cost: DecodeCost, tally: StrategyTally) -> DecodeCost:
    replace = msgspec.structs.replace
    runs = tally.control
    if runs is None:
        return replace(
            cost, tokens=cost.tokens + tally.tokens, seconds=cost.seconds + tally.seconds
        )
    return replace(
        cost,
        plain_tokens=cost.plain_tokens + tally.tokens,
        plain_seconds=cost.plain_seconds + tally.seconds,
        runs=cost.runs + runs.count,
        tokens_squared=cost.tokens_squared + runs.tokens_squared,
        seconds_squared=cost.seconds_squared + runs.seconds_squared,
        product=cost.product + runs.product,
    )


def _control_cost(cost: DecodeCost) -> float:
    """Return the seconds that control runs lost against speculation, where both decoded."""
    if cost.tokens == 0:
        return 0.0
    return cost.plain_seconds - cost.plain_tokens * cost.seconds / cost.tokens


def _relative_variance(known: Iterable[DecodeCost]) -> float:
    """Return the variance of a run's seconds, relative to the mean for its tokens."""
    squares = expected = 0.0
    for cost in known:
        plain = cost.plain_seconds / cost.plain_tokens
        if plain <= 0.0:
            continue
        residual = cost.seconds_squared / plain**2 - 2.0 * cost.product / plain
        squares += max(0.0, residual + cost.tokens_squared)
        # the mean comes from the same runs
        own = cost.tokens_squared / cost.plain_tokens**2
        expected += cost.tokens_squared * (1.0 - min(own, 1.0))
    return squares / expected if expected > 0.0 else 0.0


def _t_quantile(degrees_of_freedom: int) -> float:
    """Return Student's t at 97.5 %, from three degrees on by the Cornish-Fisher expansion."""
    if degrees_of_freedom < 3:
        return (12.7062, 4.3027)[degrees_of_freedom - 1]
    z, n = _Z, float(degrees_of_freedom)
    first = (z**3 + z) / 4.0
    second = (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0
    third = (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / 384.0
    return z + first / n + second / n**2 + third / n**3
