"""What speculation saved: seconds its tokens would have taken without it, less those they took.

What a token takes without it is known from control runs, for each bucket of batch sizes. How sure
that is follows from how much the runs differ: their spread is taken together over all buckets, in
shares of each one's mean. A bucket without a run borrows from the nearest one that has some: as
rows share a round, the token of a batch half as large takes as long, twice as long, or something
between. All seconds are of ranks: two that decode side by side spend two a second.
"""

import math
from collections.abc import Iterable, Mapping

import msgspec

from tlt.protocol.records import StrategyTally

# of a normal variable that is meant to lie within 95 %
_Z = 1.959964
# runs before a loss is believed
_ENOUGH_RUNS = 8


class DecodeCost(msgspec.Struct, frozen=True, array_like=True):
    """What a bucket's tokens took, with speculation and in control runs."""

    tokens: float = 0.0
    seconds: float = 0.0
    plain_tokens: float = 0.0
    plain_seconds: float = 0.0
    runs: int = 0
    # of each run's tokens and seconds
    tokens_squared: float = 0.0
    seconds_squared: float = 0.0
    product: float = 0.0


CostsByBucket = Mapping[int, DecodeCost]


class SavingsInterval(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, and between which two they lie in 95 of 100 cases; unknown where no two control runs
    of a bucket can be compared."""

    seconds: float
    low: float | None
    high: float | None


class BucketSavings(msgspec.Struct, frozen=True, kw_only=True):
    bucket: int
    tokens: float
    seconds: float
    # of a token, decoded alone
    plain: float
    runs: int
    # the bucket whose control runs these are
    measured_at: int
    saved: SavingsInterval


class Savings(msgspec.Struct, frozen=True, kw_only=True):
    total: SavingsInterval
    buckets: tuple[BucketSavings, ...]
    runs: int
    # seconds decoded without speculation, and how many of them it would have saved
    control_seconds: float
    control_cost: float


class _Plain(msgspec.Struct, frozen=True):
    """Of one bucket: seconds a token."""

    seconds: float
    # of that mean, in its own share
    variance: float


class PlainRates:
    """What a token takes without speculation, as far as `spending` tells."""

    def __init__(self, spending: CostsByBucket) -> None:
        known = {b: spent for b, spent in spending.items() if spent.plain_tokens > 0}
        runs = sum(spent.runs for spent in known.values())
        self._freedom = runs - len(known)
        spread = _spread(known.values())
        self._plain = {
            bucket: _Plain(
                spent.plain_seconds / spent.plain_tokens,
                spread * spent.tokens_squared / spent.plain_tokens**2,
            )
            for bucket, spent in known.items()
        }

    def __bool__(self) -> bool:
        return bool(self._plain)

    def measured_at(self, bucket: int) -> int:
        """The smaller of two that are as near."""
        return min(self._plain, key=lambda other: (max(other, bucket) / min(other, bucket), other))

    def plain(self, bucket: int) -> float:
        source = self.measured_at(bucket)
        return self._plain[source].seconds * math.sqrt(source / bucket)

    def saving(self, spending: CostsByBucket) -> SavingsInterval:
        seconds = variance = 0.0
        # what is measured at one bucket errs alike for all that borrow it
        measured: dict[int, float] = {}
        for bucket, spent in spending.items():
            source = self.measured_at(bucket)
            plain = spent.tokens * self.plain(bucket)
            measured[source] = measured.get(source, 0.0) + plain
            # the logarithm lies anywhere between the two bounds
            variance += (plain * math.log(source / bucket)) ** 2 / 12.0
            seconds += plain - spent.seconds
        if self._freedom < 1:
            return SavingsInterval(seconds=seconds, low=None, high=None)
        variance += sum(plain**2 * self._plain[at].variance for at, plain in measured.items())
        wide = _quantile(self._freedom) * math.sqrt(variance)
        return SavingsInterval(seconds=seconds, low=seconds - wide, high=seconds + wide)


def add_tallies(spending: CostsByBucket, tallies: Iterable[StrategyTally]) -> dict[int, DecodeCost]:
    """With what was decoded since."""
    after = dict(spending)
    for tally in tallies:
        before = after.get(tally.bucket, DecodeCost())
        after[tally.bucket] = _spend(before, tally)
    return after


def estimate_savings(spending: CostsByBucket) -> Savings | None:
    """None before the first control run."""
    rates = PlainRates(spending)
    if not rates:
        return None
    return Savings(
        total=rates.saving(spending),
        buckets=tuple(
            BucketSavings(
                bucket=bucket,
                tokens=spent.tokens,
                seconds=spent.seconds,
                plain=rates.plain(bucket),
                runs=spent.runs,
                measured_at=rates.measured_at(bucket),
                saved=rates.saving({bucket: spent}),
            )
            for bucket, spent in sorted(spending.items())
        ),
        runs=sum(spent.runs for spent in spending.values()),
        control_seconds=sum(spent.plain_seconds for spent in spending.values()),
        control_cost=sum(map(_control_cost, spending.values())),
    )


def estimate_speedup(spending: CostsByBucket) -> float | None:
    """How many times as fast it goes, where that is known: in buckets that have control runs."""
    rates = PlainRates(spending)
    known = {bucket: spent for bucket, spent in spending.items() if spent.plain_tokens > 0}
    seconds = math.fsum(spent.seconds for spent in known.values())
    plain = math.fsum(spent.tokens * rates.plain(bucket) for bucket, spent in known.items())
    return plain / seconds if plain > 0.0 and seconds > 0.0 else None


def estimate_loss(spending: CostsByBucket) -> SavingsInterval | None:
    """What speculation saves, where that is less than nothing beyond doubt."""
    if sum(spent.runs for spent in spending.values()) < _ENOUGH_RUNS:
        return None
    saving = PlainRates(spending).saving(spending)
    return saving if saving.high is not None and saving.high < 0.0 else None


def _spend(spent: DecodeCost, tally: StrategyTally) -> DecodeCost:
    replace = msgspec.structs.replace
    runs = tally.control
    if runs is None:
        return replace(
            spent, tokens=spent.tokens + tally.tokens, seconds=spent.seconds + tally.seconds
        )
    return replace(
        spent,
        plain_tokens=spent.plain_tokens + tally.tokens,
        plain_seconds=spent.plain_seconds + tally.seconds,
        runs=spent.runs + runs.count,
        tokens_squared=spent.tokens_squared + runs.tokens_squared,
        seconds_squared=spent.seconds_squared + runs.seconds_squared,
        product=spent.product + runs.product,
    )


def _control_cost(spent: DecodeCost) -> float:
    """Where nothing was decoded with speculation, nothing was lost without it."""
    if spent.tokens == 0:
        return 0.0
    return spent.plain_seconds - spent.plain_tokens * spent.seconds / spent.tokens


def _spread(known: Iterable[DecodeCost]) -> float:
    """The variance of a run's seconds, in shares of what its tokens take on average."""
    squares = expected = 0.0
    for spent in known:
        plain = spent.plain_seconds / spent.plain_tokens
        if plain <= 0.0:
            continue
        residual = spent.seconds_squared / plain**2 - 2.0 * spent.product / plain
        squares += max(0.0, residual + spent.tokens_squared)
        # the mean was taken from the same runs
        own = spent.tokens_squared / spent.plain_tokens**2
        expected += spent.tokens_squared * (1.0 - min(own, 1.0))
    return squares / expected if expected > 0.0 else 0.0


def _quantile(freedom: int) -> float:
    """Of Student's t at 97.5 %, by Cornish and Fisher's expansion from three degrees on."""
    if freedom < 3:
        return (12.7062, 4.3027)[freedom - 1]
    z, n = _Z, float(freedom)
    first = (z**3 + z) / 4.0
    second = (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0
    third = (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / 384.0
    return z + first / n + second / n**2 + third / n**3
