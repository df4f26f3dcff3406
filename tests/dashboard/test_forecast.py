"""When the last answer will be there, where the truth is known."""

from heapq import heapify, heapreplace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt.dashboard.tail_forecast import Done, forecast

_SECONDS = st.floats(0.01, 1000.0)
_DONE = st.builds(Done, st.integers(0, 500), _SECONDS)
# of 1 to 100 tokens, ten a second
_FINISHED = [Done(tokens, tokens / 10) for tokens in range(1, 101)]


def test_who_has_half_of_the_longest_has_a_quarter_before_him() -> None:
    told = forecast([5.0], _FINISHED, 100, 0, 1)
    assert told is not None
    assert told.p50 == pytest.approx(2.5, abs=0.2)
    assert told.p90 == pytest.approx(4.5, abs=0.3)


def test_the_last_of_many_takes_as_long_as_the_longest() -> None:
    told = forecast([0.0] * 50, _FINISHED, 100, 0, 50)
    assert told is not None
    assert told.p50 == pytest.approx(10.0, abs=0.3)


def test_room_ends_what_nothing_else_does() -> None:
    """All were short; one is not, and has at most its room."""
    short = [Done(10, 1.0)] * 100
    told = forecast([30.0], short, 400, 0, 1)
    assert told is not None
    assert told.p50 == pytest.approx(5.0, abs=0.1)
    late = forecast([45.0], short, 400, 0, 1)
    assert late is not None
    assert late.p90 < 1.0


def test_what_waits_in_the_queue_comes_on_top() -> None:
    alone = forecast([5.0], _FINISHED, 100, 0, 4)
    queued = forecast([5.0], _FINISHED, 100, 40, 4)
    assert alone is not None
    assert queued is not None
    assert queued.p50 - alone.p50 > 40 * 5.0 / 4


_PACE = 0.02


def length(chooser: Random) -> int:
    """As answers are: a few take far longer than the others, and some their whole room."""
    return min(4096, int(chooser.lognormvariate(6, 0.8)) + 1)


def simulated(running: int, age: float, queued: int, slots: int) -> list[float]:
    chooser = Random(5)
    return sorted(_last_of(chooser, running, age, queued, slots) for _ in range(60))


def _last_of(chooser: Random, running: int, age: float, queued: int, slots: int) -> float:
    left: list[float] = []
    while len(left) < running:
        seconds = length(chooser) * _PACE - age
        if seconds > 0.0:
            left.append(seconds)
    free = left + [0.0] * (slots - running)
    heapify(free)
    last = max(left, default=0.0)
    for _ in range(queued):
        ends = free[0] + length(chooser) * _PACE
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
def test_it_is_what_a_simulation_says(running: int, age: float, queued: int, slots: int) -> None:
    chooser = Random(1)
    finished = [Done(n, n * _PACE) for n in (length(chooser) for _ in range(1000))]
    seen = min(running, 128)
    told = forecast([age] * seen, finished, 4096, queued, slots, running - seen)
    truth = simulated(running, age, queued, slots)
    assert told is not None
    assert told.p50 == pytest.approx(truth[30], rel=0.2)
    assert told.p90 == pytest.approx(truth[54], rel=0.2)


def test_nothing_is_said_where_nothing_is_known() -> None:
    assert forecast([1.0], [], 100, 0, 1) is None
    assert forecast([1.0], [Done(0, 0.0)], 100, 0, 1) is None
    assert forecast([], _FINISHED, 100, 0, 1) is None


@given(
    st.lists(_SECONDS, min_size=1, max_size=20),
    st.lists(_DONE, min_size=1, max_size=50),
    st.integers(1, 1000),
    st.integers(0, 100),
)
def test_it_is_in_order_and_never_in_the_past(
    running: list[float], finished: list[Done], room: int, queued: int
) -> None:
    told = forecast(running, finished, room, queued, 4)
    assert told is None or 0.0 <= told.p50 <= told.p90
