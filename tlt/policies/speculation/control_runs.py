"""Decode some steps in a row without speculation now and then, as control runs.

Each bucket of batch sizes gets one run in each interval of its decoding time, at a random point of
the interval, so that no step of a bucket is more likely to be sampled than another. A run lasts a
fixed number of steps, even if the batch size changes meanwhile, and each step counts for the bucket
that it was in; otherwise a draining batch would make plain decoding appear slow.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tlt.policies.speculation.strategy_policy import (
    Choice,
    StepObservation,
    StrategyPolicy,
    bucket_of,
)
from tlt.strategies import Off, Strategy

RUN_STEPS = 32
_BELOW_ONE = math.nextafter(1.0, 0.0)


@dataclass
class _Bucket:
    # steps of mean duration that are left of the current interval
    left: float
    # True once a run of the current interval has begun
    sampled: bool = False
    # steps decoded with speculation, and their seconds
    steps: int = 0
    seconds: float = 0.0


class ControlRunPolicy:
    """Wrap a policy: at most `share` of all steps, and one run per bucket, become control runs."""

    def __init__(self, policy: StrategyPolicy, share: float) -> None:
        if not 0.0 < share < 0.5:
            raise ValueError("a share of the steps lies above 0 and below a half")
        self._policy = policy
        self._share = share
        self._interval = RUN_STEPS * (1.0 - share) / share
        self._buckets: dict[int, _Bucket] = {}
        self._steps = 0
        self._runs = 0
        self._run_steps_left = 0
        self._in_run = False

    def set_strategies(self, strategies: Sequence[Strategy]) -> None:
        self._policy.set_strategies(strategies)

    def choose(self, batch: int, context: int, random: float) -> Choice:
        self._steps += 1
        if self._run_steps_left == 0:
            bucket = self._bucket(batch)
            chance = self._start_chance(bucket)
            if random >= chance:
                self._in_run = False
                # the remainder of the number, rescaled, is random as well
                rest = min((random - chance) / (1.0 - chance), _BELOW_ONE)
                return self._policy.choose(batch, context, rest)
            bucket.sampled = True
            self._runs += 1
            self._run_steps_left = RUN_STEPS
        self._run_steps_left -= 1
        self._in_run = True
        return Choice(Off(), 0.0, "control")

    def observe(self, step: StepObservation) -> None:
        self._policy.observe(step)
        if not self._in_run:
            bucket = self._bucket(step.batch)
            bucket.steps += 1
            bucket.seconds += step.seconds

    def observe_probe(
        self, strategy: Strategy, batch: int, reached: Sequence[int], accepted: Sequence[int]
    ) -> None:
        self._policy.observe_probe(strategy, batch, reached, accepted)

    def handle_drafter_swap(self) -> None:
        self._policy.handle_drafter_swap()

    def handle_weight_swap(self) -> None:
        """End the control run: weights are swapped between rollouts."""
        self._run_steps_left = 0
        self._policy.handle_weight_swap()

    def _start_chance(self, bucket: _Bucket) -> float:
        """Return the probability that a run begins now, and use up the step's interval."""
        if bucket.left <= 0.0:
            bucket.left, bucket.sampled = self._interval, False
        weight = self._step_weight(bucket)
        chance = 0.0 if bucket.sampled else min(weight / bucket.left, 1.0)
        bucket.left -= weight
        first_runs = RUN_STEPS * (len(self._buckets) - 1)
        affordable = RUN_STEPS * self._runs <= self._share * self._steps + first_runs
        return chance if affordable else 0.0

    def _step_weight(self, bucket: _Bucket) -> float:
        """Return the mean duration of the bucket's steps against that of all steps.

        Weights of single steps would sample the bucket's longer steps more often.
        """
        steps = sum(each.steps for each in self._buckets.values())
        seconds = sum(each.seconds for each in self._buckets.values())
        if bucket.steps == 0 or not 0.0 < seconds < math.inf:
            return 1.0
        return bucket.seconds / bucket.steps * steps / seconds

    def _bucket(self, batch: int) -> _Bucket:
        return self._buckets.setdefault(bucket_of(batch), _Bucket(left=self._interval))
