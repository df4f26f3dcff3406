"""What speculation is measured against: now and then some rounds in a row decode without it.

A bucket of batch sizes has one such run in each stretch of the time that it carries, at a place of
the stretch where chance put it: no round of a bucket is more likely to be met than another,
whatever it is like. A run goes on for its rounds, however the batch changes meanwhile. Each round
counts for the bucket that it was in: were the run counted where it began, a draining batch would
make plain decoding look slow.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tlt.policies.speculation.strategy_policy import Choice, StrategyPolicy, bucket_of
from tlt.strategies import Off, Strategy

RUN_STEPS = 32
_BELOW_ONE = math.nextafter(1.0, 0.0)


@dataclass
class _Bucket:
    # what is left of the stretch in hand, in mean rounds, and whether it has had its run
    left: float
    met: bool = False
    # of speculation
    rounds: int = 0
    seconds: float = 0.0


class ControlRunPolicy:
    """Never more than `share` of all rounds, and a run for each bucket."""

    def __init__(self, policy: StrategyPolicy, share: float) -> None:
        if not 0.0 < share < 0.5:
            raise ValueError("a share of the rounds lies above 0 and below a half")
        self._policy = policy
        self._share = share
        self._stretch = RUN_STEPS * (1.0 - share) / share
        self._buckets: dict[int, _Bucket] = {}
        self._rounds = 0
        self._runs = 0
        self._rounds_left = 0
        self._plain = False

    def set_strategies(self, arms: Sequence[Strategy]) -> None:
        self._policy.set_strategies(arms)

    def choose(self, batch: int, context: int, random: float) -> Choice:
        self._rounds += 1
        if self._rounds_left == 0:
            bucket = self._bucket(bucket_of(batch))
            chance = self._chance(bucket)
            if random >= chance:
                self._plain = False
                # what is left of the number is as random as the whole
                rest = min((random - chance) / (1.0 - chance), _BELOW_ONE)
                return self._policy.choose(batch, context, rest)
            bucket.met = True
            self._runs += 1
            self._rounds_left = RUN_STEPS
        self._rounds_left -= 1
        self._plain = True
        return Choice(Off(), 0.0, "control")

    def observe(
        self,
        strategy: Strategy,
        batch: int,
        context: int,
        seconds: float,
        drafting: float,
        reached: Sequence[int],
        accepted: Sequence[int],
        width: int | None = None,
    ) -> None:
        self._policy.observe(strategy, batch, context, seconds, drafting, reached, accepted, width)
        if not self._plain:
            bucket = self._bucket(bucket_of(batch))
            bucket.rounds += 1
            bucket.seconds += seconds

    def observe_probe(
        self, strategy: Strategy, batch: int, reached: Sequence[int], accepted: Sequence[int]
    ) -> None:
        self._policy.observe_probe(strategy, batch, reached, accepted)

    def handle_drafter_swap(self) -> None:
        self._policy.handle_drafter_swap()

    def handle_weight_swap(self) -> None:
        """Between two rollouts: what was running has ended."""
        self._rounds_left = 0
        self._policy.handle_weight_swap()

    def _chance(self, bucket: _Bucket) -> float:
        """That a run begins in this round."""
        if bucket.left <= 0.0:
            bucket.left, bucket.met = self._stretch, False
        passing = self._weight(bucket)
        chance = 0.0 if bucket.met else min(passing / bucket.left, 1.0)
        bucket.left -= passing
        return chance if self._may_begin() else 0.0

    def _weight(self, bucket: _Bucket) -> float:
        """How long its rounds last, on average, against all. Were each weighed by itself, the
        bucket's longer rounds would be met more often."""
        rounds = sum(each.rounds for each in self._buckets.values())
        seconds = sum(each.seconds for each in self._buckets.values())
        if bucket.rounds == 0 or not 0.0 < seconds < math.inf:
            return 1.0
        return bucket.seconds / bucket.rounds * rounds / seconds

    def _may_begin(self) -> bool:
        first_ones = RUN_STEPS * (len(self._buckets) - 1)
        return RUN_STEPS * self._runs <= self._share * self._rounds + first_ones

    def _bucket(self, name: int) -> _Bucket:
        return self._buckets.setdefault(name, _Bucket(left=self._stretch))
