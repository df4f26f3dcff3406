"""Estimated savings are right within their interval, and certain losses are found.

The simulated jobs are the benchmark's, in which the truth is known.
"""

from collections.abc import Sequence
from random import Random
from statistics import fmean

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.ledger import simulate
from tlt.base.strategies import Draft, Off
from tlt.policies.speculation import savings_estimate
from tlt.policies.speculation.plain_replay import Replay
from tlt.policies.speculation.plain_step_costs import fit_plain_step_costs
from tlt.policies.speculation.savings_estimate import DecodeAccount
from tlt.protocol.shared_values import ControlRuns, StrategyTally

_STEPS = 4


def test_estimate_is_unbiased_and_its_interval_covers_the_truth() -> None:
    found = [truth for seed in range(6) if (truth := simulate(seed)) is not None]
    assert len(found) == 6
    assert sum(truth.covered for truth in found) >= 5
    assert abs(fmean((truth.seconds - truth.saved) / truth.off for truth in found)) < 0.02
    # some of these jobs gained and some lost
    assert min(truth.saved for truth in found) < 0.0 < max(truth.saved for truth in found)


def control(bucket: int, seconds: Sequence[float], overhead: float = 0.0) -> StrategyTally:
    """Return runs of four steps; `overhead` is that of each run, beyond its seconds."""
    runs = ControlRuns(
        count=len(seconds),
        steps_squared=len(seconds) * float(_STEPS) ** 2,
        seconds_squared=sum(s**2 for s in seconds),
        product=_STEPS * sum(seconds),
    )
    steps = _STEPS * len(seconds)
    whole = overhead * len(seconds)
    return _tally(bucket, steps, steps * bucket, sum(seconds) + whole, runs, whole)


def speculated(bucket: int, steps: int, tokens: int, seconds: float) -> StrategyTally:
    return _tally(bucket, steps, tokens, seconds, None, 0.0)


def chosen(bucket: int, steps: int, seconds: float) -> StrategyTally:
    """Return plain steps outside of control runs."""
    plain = _tally(bucket, steps, steps * bucket, seconds, None, 0.0)
    return msgspec.structs.replace(plain, strategy=Off())


def _tally(
    bucket: int,
    steps: int,
    tokens: int,
    seconds: float,
    runs: ControlRuns | None,
    overhead: float,
) -> StrategyTally:
    return StrategyTally(
        strategy=Draft(depth=2),
        bucket=bucket,
        drafter=None,
        control=runs,
        steps=steps,
        explored=0,
        rows=steps * bucket,
        tokens=tokens,
        seconds=seconds,
        work=seconds,
        overhead=overhead,
        expected=0.0,
    )


def account(
    tallies: Sequence[StrategyTally],
    plain_steps: dict[int, float],
    beside: Sequence[StrategyTally] = (),
) -> DecodeAccount:
    decoded = savings_estimate.add_tallies(DecodeAccount(), tallies, beside_training=False)
    decoded = savings_estimate.add_tallies(decoded, beside, beside_training=True)
    return savings_estimate.add_replay(decoded, Replay(steps=plain_steps, last=plain_steps))


@settings(max_examples=60)
@given(speedup=st.floats(0.3, 3.0), seed=st.integers(0, 1000), runs=st.integers(1, 80))
def test_gives_up_speculation_that_is_certainly_slower(
    speedup: float, seed: int, runs: int
) -> None:
    """Plain steps take .25 s, and 4,000 of them would have been needed."""
    dice = Random(seed)
    seconds = [dice.gauss(1.0, 0.05) for _ in range(runs)]
    spent = speculated(4, 1000, 16_000, 1000.0 / speedup)
    lost = savings_estimate.estimate_loss(account([control(4, seconds), spent], {4: 4000.0}), 0.0)
    if runs < 32 or speedup > 1.1:
        assert lost is None
    elif speedup < 0.8:
        assert lost is not None
        assert lost.seconds < lost.high < 0


def test_overhead_and_control_runs_count_against_the_savings() -> None:
    """A plain step takes .25 s; of the 10 s that were spent, 1 s was the overhead of controls."""
    runs = control(4, [1.0, 1.01, 0.99, 1.0], overhead=0.25)
    savings = savings_estimate.estimate_savings(
        account([runs, speculated(4, 10, 100, 5.0)], {4: 40.0}), 0.0
    )
    assert savings is not None
    assert savings.overhead == pytest.approx(1.0)
    assert savings.plain_seconds == pytest.approx(10.0, rel=0.01)
    assert savings.total.seconds == pytest.approx(0.0, abs=0.1)
    assert savings.control_seconds == pytest.approx(5.0)


def test_slower_decoding_beside_training_counts_against_the_savings() -> None:
    """Steps take .25 s, and a tenth more beside training, where no control run ran alone."""
    alone = control(4, [1.0, 1.01, 0.99] * 10)
    beside = control(2, [1.1, 1.11, 1.09] * 10)
    both_alone = account([alone, control(2, [1.0, 1.01, 0.99] * 10)], {2: 4.0})
    mixed = account([alone], {2: 4.0}, beside=[beside, control(4, [1.1, 1.11, 1.09] * 10)])
    plain = savings_estimate.plain_step_costs(both_alone), savings_estimate.plain_step_costs(mixed)
    assert plain[0] is not None
    assert plain[1] is not None
    assert plain[1].seconds(2) == pytest.approx(plain[0].seconds(2), rel=0.01)


def test_bucket_without_control_runs_lies_between_its_neighbours() -> None:
    both = {
        bucket: control(bucket, [seconds, 1.02 * seconds, 0.98 * seconds])
        for bucket, seconds in ((1, 1.0), (4, 1.6))
    }
    found = savings_estimate.plain_step_costs(account([both[1], both[4]], {1: 1.0}))
    alone = savings_estimate.plain_step_costs(account([both[4]], {1: 1.0}))
    assert found is not None
    assert alone is not None
    assert found.seconds(1) == pytest.approx(0.25, rel=0.02)
    assert found.seconds(4) == pytest.approx(0.4, rel=0.02)
    assert 0.27 < found.seconds(2) < 0.37
    # a decode step of one row takes between a quarter of the time of four rows and all of it
    wide, narrow = (plain.saving({1: 100.0}, 0.0) for plain in (alone, found))
    assert wide.high - wide.low > 3 * (narrow.high - narrow.low)
    assert wide.low < narrow.seconds < wide.high
    # and 16 rows between the same time as 4 and four times as long
    beyond = found.saving({16: 100.0}, 0.0)
    assert beyond.low < 60.0
    assert beyond.high > 100.0


def test_claims_nothing_without_an_interval() -> None:
    spent = speculated(2, 32, 64, 1.0)
    for tallies in (
        [spent],
        [control(2, [1.0]), spent],
        [control(2, [1.0]), control(4, [1.0]), spent],
    ):
        assert savings_estimate.estimate_savings(account(tallies, {2: 32.0}), 0.0) is None
    found = savings_estimate.estimate_savings(
        account([control(2, [1.0, 1.1]), spent], {2: 32.0}), 0.0
    )
    assert found is not None
    assert found.total.low < found.total.high
    assert fit_plain_step_costs({}) is None


def test_plain_steps_that_were_chosen_narrow_the_interval() -> None:
    """A plain step takes .25 s, and nothing was saved in 200 steps."""
    dice = Random(3)
    few = control(4, [dice.gauss(1.0, 0.1) for _ in range(3)])
    many = [chosen(4, 10, dice.gauss(2.5, 0.1)) for _ in range(17)]
    spent = speculated(4, 18, 72, 200 * 0.25 - sum(t.work for t in (few, *many)))
    found = savings_estimate.estimate_savings(account([few, *many, spent], {4: 200.0}), 0.0)
    assert found is not None
    assert found.total.low < 0.0 < found.total.high
    assert found.total.high - found.total.low < 0.05 * found.plain_seconds
    assert found.runs == 3


def test_seconds_of_the_open_batch_are_not_judged_yet() -> None:
    decoded = account([control(2, [1.0, 1.1]), speculated(2, 32, 64, 7.0)], {2: 32.0})
    whole, before = (savings_estimate.estimate_savings(decoded, open_) for open_ in (0.0, 3.0))
    assert whole is not None
    assert before is not None
    assert before.total.seconds == pytest.approx(whole.total.seconds + 3.0)


@given(parts=st.lists(st.tuples(st.sampled_from([1, 4]), st.floats(0.1, 2.0)), max_size=12))
def test_sums_do_not_depend_on_the_order_of_reports(parts: list[tuple[int, float]]) -> None:
    tallies = [control(bucket, [seconds]) for bucket, seconds in parts]
    at_once, one_by_one = account(tallies, {}), DecodeAccount()
    for report in reversed(tallies):
        one_by_one = savings_estimate.add_tallies(one_by_one, [report], beside_training=False)
    assert at_once.controls.keys() == one_by_one.controls.keys()
    for key, sums in at_once.controls.items():
        assert sums.runs == one_by_one.controls[key].runs
        assert sums.seconds_squared == pytest.approx(one_by_one.controls[key].seconds_squared)
