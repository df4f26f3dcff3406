"""Seconds count in which all answers of a worker wait for environments."""

from tlt.actors.worker.tool_clock import ToolClock, Wait


def test_counts_while_all_answers_wait() -> None:
    now = 0.0
    clock = ToolClock(lambda: now)
    answer, other = Wait(clock), Wait(clock)
    other.switch(False)
    now = 2.0
    assert clock.take() == 0.0
    other.switch(True)
    now = 5.0
    assert clock.take() == 3.0
    answer.switch(False)
    now = 6.0
    answer.end()
    now = 8.0
    assert clock.take() == 2.0
    other.end()
    now = 9.0
    assert clock.take() == 0.0
