"""When the last answer will be there, where the truth is known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt.dashboard.forecast import forecast

_SECONDS = st.floats(0.1, 1000.0)


def test_who_has_run_longer_than_half_of_them_has_the_other_half_before_him() -> None:
    finished = [float(n) for n in range(1, 101)]
    told = forecast([50.0], finished, 0, 1)
    assert told is not None
    assert told.p50 == pytest.approx(25.0, abs=1.5)
    assert told.p90 == pytest.approx(45.0, abs=2.0)


def test_the_last_of_many_takes_about_as_long_as_the_longest() -> None:
    finished = [float(n) for n in range(1, 101)]
    told = forecast([0.0] * 50, finished, 0, 50)
    assert told is not None
    assert 95.0 < told.p50 < 130.0


def test_what_waits_in_the_queue_comes_on_top() -> None:
    finished = [10.0] * 100
    alone = forecast([5.0], finished, 0, 4)
    queued = forecast([5.0], finished, 40, 4)
    assert alone is not None
    assert queued is not None
    assert queued.p50 - alone.p50 > 90.0


def test_nothing_is_said_where_nothing_is_known() -> None:
    assert forecast([1.0], [], 0, 1) is None
    assert forecast([], [1.0], 0, 1) is None


@given(st.lists(_SECONDS, min_size=1, max_size=20), st.lists(_SECONDS, min_size=1, max_size=50))
def test_it_is_in_order_and_never_in_the_past(running: list[float], finished: list[float]) -> None:
    told = forecast(running, finished, 0, len(running))
    assert told is not None
    assert 0.0 <= told.p50 <= told.p90
