"""Estimated savings are right within their interval, and certain losses are found.

The simulated worlds are the benchmark's; true savings compare with plain decoding of as many
tokens on their machine.
"""

import math
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.decoding_world import Machine, Text, decode, lengths
from tlt.policies.speculation.control_runs import ControlRunPolicy
from tlt.policies.speculation.fixed_strategy import FixedPolicy
from tlt.policies.speculation.savings_estimate import (
    DecodeCost,
    PlainRates,
    Savings,
    add_tallies,
    estimate_loss,
    estimate_savings,
)
from tlt.policies.speculation.strategy_policy import Choice, StepObservation
from tlt.policies.speculation.strategy_runs import StrategyRuns
from tlt.policies.speculation.strategy_tallies import TallyCollector
from tlt.protocol.shared_values import ControlRuns, StrategyTally
from tlt.strategies import Draft, Strategy

MACHINE = Machine(outliers=0.0)


class MeasuredRuns(StrategyRuns):
    """Runs of steps with control runs, which also know the true savings."""

    def __init__(self, strategy: Strategy, share: float, seed: int) -> None:
        super().__init__(ControlRunPolicy(FixedPolicy(strategy), share), Random(seed).random)
        self.tallies = TallyCollector()
        self.truth = self.seconds = 0.0
        self._chosen: Choice | None = None

    def choose(self, batch: int, context: int) -> Choice:
        self._chosen = super().choose(batch, context)
        return self._chosen

    def observe(self, step: StepObservation) -> None:
        super().observe(step)
        assert self._chosen is not None
        tokens = step.batch + sum(step.accepted)
        self.tallies.add(self._chosen, None, step.batch, tokens, step.seconds, step.seconds)
        if self._chosen.why != "control":
            noise = math.exp(MACHINE.noise**2 / 2)
            plain = tokens / step.batch * MACHINE.passing(0, step.batch, step.context)
            self.truth += plain * noise - step.seconds
            self.seconds += step.seconds


def decoded(strategy: Strategy, acceptance: float, seed: int) -> tuple[Savings, float, float]:
    """Return the estimate, the true savings, and the seconds."""
    runs = MeasuredRuns(strategy, 0.15, seed)
    text = Text(drafter=lambda done: acceptance, ngram=lambda done: 0.0)
    decode(runs, MACHINE, text, [lengths(16, Random(1000 * seed + i)) for i in range(10)], seed)
    found = estimate_savings(add_tallies({}, runs.tallies.take(idle=True)))
    assert found is not None
    return found, runs.truth, runs.seconds


@pytest.mark.parametrize(("strategy", "acceptance"), [(Draft(depth=4), 0.8), (Draft(depth=8), 0.1)])
def test_estimate_is_unbiased_and_its_interval_covers_the_truth(
    strategy: Strategy, acceptance: float
) -> None:
    errors: list[float] = []
    within = 0
    for seed in range(8):
        found, truth, seconds = decoded(strategy, acceptance, seed)
        total = found.total
        assert total.low is not None
        assert total.high is not None
        within += total.low <= truth <= total.high
        errors.append((total.seconds - truth) / seconds)
        assert (truth > 0) == (acceptance > 0.5)
    assert abs(sum(errors) / len(errors)) < 0.04
    assert within >= 6


def control(bucket: int, seconds: Sequence[float], tokens: int = 32) -> StrategyTally:
    runs = ControlRuns(
        count=len(seconds),
        tokens_squared=len(seconds) * float(tokens) ** 2,
        seconds_squared=sum(s**2 for s in seconds),
        product=tokens * sum(seconds),
    )
    return _tally(bucket, tokens * len(seconds), sum(seconds), runs)


def speculated(bucket: int, tokens: int, seconds: float) -> StrategyTally:
    return _tally(bucket, tokens, seconds, None)


def _tally(bucket: int, tokens: int, seconds: float, runs: ControlRuns | None) -> StrategyTally:
    return StrategyTally(
        strategy=Draft(depth=2),
        bucket=bucket,
        drafter=None,
        control=runs,
        steps=1,
        explored=0,
        rows=1,
        tokens=tokens,
        seconds=seconds,
        expected=0.0,
    )


@settings(max_examples=60)
@given(speedup=st.floats(0.3, 3.0), seed=st.integers(0, 1000), runs=st.integers(1, 40))
def test_gives_up_speculation_that_is_certainly_slower(
    speedup: float, seed: int, runs: int
) -> None:
    dice = Random(seed)
    seconds = [dice.gauss(1.0, 0.05) for _ in range(runs)]
    lost = estimate_loss(
        add_tallies({}, [control(4, seconds), speculated(4, 32_000, 1000.0 / speedup)])
    )
    if runs < 8 or speedup > 1.1:
        assert lost is None
    elif speedup < 0.9:
        assert lost is not None
        assert lost.high is not None
        assert lost.seconds < lost.high < 0


def test_bucket_without_control_runs_borrows_and_widens_its_interval() -> None:
    spending = add_tallies(
        {}, [control(4, [1.0, 1.1, 0.9]), speculated(4, 320, 5.0), speculated(1, 320, 5.0)]
    )
    found = estimate_savings(spending)
    assert found is not None
    one, four = found.buckets
    assert (one.measured_at, four.measured_at) == (4, 4)
    # a decode step of one row takes between a quarter of the time of four rows and all of it
    assert four.plain == pytest.approx(1 / 32)
    assert one.plain == pytest.approx(2 / 32)
    assert one.saved.low is not None
    assert four.saved.low is not None
    assert one.saved.seconds - one.saved.low > 3 * (four.saved.seconds - four.saved.low)


def test_claims_nothing_without_an_interval() -> None:
    spent = [speculated(2, 64, 1.0)]
    assert not PlainRates({})
    assert estimate_savings(add_tallies({}, spent)) is None
    assert estimate_savings(add_tallies({}, [control(2, [1.0]), *spent])) is None
    assert estimate_savings(add_tallies({}, [control(2, [1.0]), control(4, [1.0]), *spent])) is None
    found = estimate_savings(add_tallies({}, [control(2, [1.0, 1.1]), *spent]))
    assert found is not None
    assert found.total.low is not None


@given(parts=st.lists(st.tuples(st.sampled_from([1, 4]), st.floats(0.1, 2.0)), max_size=12))
def test_sums_do_not_depend_on_the_order_of_reports(parts: list[tuple[int, float]]) -> None:
    tallies = [control(bucket, [seconds]) for bucket, seconds in parts]
    at_once, one_by_one = add_tallies({}, tallies), dict[int, DecodeCost]()
    for report in reversed(tallies):
        one_by_one = add_tallies(one_by_one, [report])
    assert at_once.keys() == one_by_one.keys()
    for bucket, spent in at_once.items():
        assert spent.runs == one_by_one[bucket].runs
        assert spent.seconds_squared == pytest.approx(one_by_one[bucket].seconds_squared)
