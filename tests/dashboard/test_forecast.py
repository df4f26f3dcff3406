"""Forecasts of the last answer agree with cases whose truth is known."""

from heapq import heapify, heapreplace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt.dashboard.tail_forecast import FinishedAnswer, forecast

_SECONDS = st.floats(0.01, 1000.0)
_DONE = st.builds(FinishedAnswer, st.integers(0, 500), _SECONDS)
# answers of 1 to 100 tokens, at ten tokens a second
_FINISHED = [FinishedAnswer(tokens, tokens / 10) for tokens in range(1, 101)]


def test_answer_with_half_of_the_longest_length_needs_another_quarter() -> None:
    result = forecast([5.0], _FINISHED, 100, 0, 1)
    assert result is not None
    assert result.p50 == pytest.approx(2.5, abs=0.2)
    assert result.p90 == pytest.approx(4.5, abs=0.3)


def test_the_last_of_many_takes_as_long_as_the_longest() -> None:
    result = forecast([0.0] * 50, _FINISHED, 100, 0, 50)
    assert result is not None
    assert result.p50 == pytest.approx(10.0, abs=0.3)


def test_token_limit_bounds_an_unusually_long_answer() -> None:
    short = [FinishedAnswer(10, 1.0)] * 100
    result = forecast([30.0], short, 400, 0, 1)
    assert result is not None
    assert result.p50 == pytest.approx(5.0, abs=0.1)
    late = forecast([45.0], short, 400, 0, 1)
    assert late is not None
    assert late.p90 < 1.0


def test_queued_answers_add_their_time() -> None:
    alone = forecast([5.0], _FINISHED, 100, 0, 4)
    queued = forecast([5.0], _FINISHED, 100, 40, 4)
    assert alone is not None
    assert queued is not None
    assert queued.p50 - alone.p50 > 40 * 5.0 / 4


_SECONDS_PER_TOKEN = 0.02


def length(chooser: Random) -> int:
    """Draw a length; a few are far longer than the others, and some reach the limit of 4096."""
    return min(4096, int(chooser.lognormvariate(6, 0.8)) + 1)


def simulated(running: int, age: float, queued: int, slots: int) -> list[float]:
    chooser = Random(5)
    return sorted(_last_of(chooser, running, age, queued, slots) for _ in range(60))


def _last_of(chooser: Random, running: int, age: float, queued: int, slots: int) -> float:
    left: list[float] = []
    while len(left) < running:
        seconds = length(chooser) * _SECONDS_PER_TOKEN - age
        if seconds > 0.0:
            left.append(seconds)
    free = left + [0.0] * (slots - running)
    heapify(free)
    last = max(left, default=0.0)
    for _ in range(queued):
        ends = free[0] + length(chooser) * _SECONDS_PER_TOKEN
        heapreplace(free, ends)
        last = max(last, ends)
    return last


@pytest.mark.parametrize(
    ("running", "age", "queued", "slots"),
    [
        *((3, 5.0, 0, 64), (32, 5.0, 0, 64), (200, 5.0, 0, 200), (2000, 5.0, 0, 2000)),
        *((0, 0.0, 64, 64), (64, 2.0, 64, 64), (64, 2.0, 640, 64), (16, 2.0, 24, 64)),
    ],
)
def test_forecast_agrees_with_a_simulation(
    running: int, age: float, queued: int, slots: int
) -> None:
    chooser = Random(1)
    finished = [
        FinishedAnswer(n, n * _SECONDS_PER_TOKEN) for n in (length(chooser) for _ in range(1000))
    ]
    seen = min(running, 128)
    result = forecast([age] * seen, finished, 4096, queued, slots, running - seen)
    truth = simulated(running, age, queued, slots)
    assert result is not None
    assert result.p50 == pytest.approx(truth[30], rel=0.2)
    assert result.p90 == pytest.approx(truth[54], rel=0.2)


def test_no_forecast_without_finished_or_unfinished_answers() -> None:
    assert forecast([1.0], [], 100, 0, 1) is None
    assert forecast([1.0], [FinishedAnswer(0, 0.0)], 100, 0, 1) is None
    assert forecast([], _FINISHED, 100, 0, 1) is None


@given(
    st.lists(_SECONDS, min_size=1, max_size=20),
    st.lists(_DONE, min_size=1, max_size=50),
    st.integers(1, 1000),
    st.integers(0, 100),
)
def test_quantiles_are_ordered_and_not_negative(
    running: list[float], finished: list[FinishedAnswer], limit: int, queued: int
) -> None:
    result = forecast(running, finished, limit, queued, 4)
    assert result is None or 0.0 <= result.p50 <= result.p90
