"""The speedup by n-grams is measured by control runs, and combined with that by a drafter."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.samples import tally
from tests.simulation.specs import small_spec
from tlt.base.strategies import Ngram, Off
from tlt.policies.drafter import speedup_model
from tlt.policies.speculation.savings_estimate import DecodeAccount, add_tallies
from tlt.protocol.shared_values import ControlRuns, StrategyTally


def test_measures_ngrams_where_control_runs_exist() -> None:
    """A tail of single answers has no control run, so the time of plain decoding is unknown."""
    spec = small_spec(steps=30, train="auto")
    measured = [with_ngrams(1000, 0.5), control_runs(20, 1000, 1.0)]
    found = speedup_model.without_drafter(spec, decoded(measured))
    assert found == pytest.approx(2.0, rel=0.05)
    tail = tally(1000, 9.0, strategy=Ngram(tokens=4), bucket=32)
    assert speedup_model.without_drafter(spec, decoded([*measured, tail])) == found
    usual = speedup_model.without_drafter(spec, DecodeAccount())
    assert speedup_model.without_drafter(spec, decoded([tail])) == usual
    one_run = decoded([with_ngrams(1000, 0.5), control_runs(1, 1000, 1.0)])
    assert speedup_model.without_drafter(spec, one_run) < found
    # a drafter leaves n-grams the steps at which it is worse
    assert (
        speedup_model.without_drafter(
            small_spec(steps=30, train="auto", drafter="/drafter"), decoded(measured)
        )
        == usual
    )


def decoded(tallies: Sequence[StrategyTally]) -> DecodeAccount:
    return add_tallies(DecodeAccount(), tallies, beside_training=False)


def with_ngrams(tokens: int, seconds: float) -> StrategyTally:
    return tally(tokens, seconds, strategy=Ngram(tokens=4))


def control_runs(runs: int, tokens: int, seconds: float) -> StrategyTally:
    """Return a tally of control runs of this many tokens and seconds each."""
    sums = ControlRuns(
        count=runs,
        steps_squared=runs * tokens**2,
        seconds_squared=runs * seconds**2,
        product=runs * tokens * seconds,
    )
    steps = runs * tokens
    return tally(steps, runs * seconds, strategy=Off(), control=sums, steps=steps, rows=steps)


@given(
    tokens=st.integers(0, 10**6),
    seconds=st.just(0.0) | st.floats(1e-9, 1e6),
    plain=st.just(0.0) | st.floats(1e-9, 1e3),
    runs=st.integers(0, 50),
)
def test_speedup_by_ngrams_is_finite(tokens: int, seconds: float, plain: float, runs: int) -> None:
    costs = decoded([with_ngrams(tokens, seconds), control_runs(runs, 100, plain)])
    assert 1.0 <= speedup_model.without_drafter(small_spec(train="auto"), costs) < math.inf


@given(without=st.floats(1.0, 4.0), length=st.floats(1.0, 12.0))
def test_a_drafter_adds_to_ngrams(without: float, length: float) -> None:
    """A useless drafter adds nothing, and together they gain at least as much as each alone."""
    assert speedup_model.with_drafter(1.0, without) == pytest.approx(without)
    both = speedup_model.with_drafter(length, without)
    assert both >= max(without, speedup_model.with_drafter(length, 1.0)) - 1e-9
    assert both <= without * speedup_model.with_drafter(length, 1.0) + 1e-9
