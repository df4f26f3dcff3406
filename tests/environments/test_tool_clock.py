"""Seconds count in which all answers of a rank wait for environments."""

from tlt.actors.worker.tool_clock import ToolClock, Wait


def test_counts_while_all_answers_of_a_rank_wait() -> None:
    now = 0.0
    clock = ToolClock(lambda: now)
    answer, other = Wait(clock, "rank"), Wait(clock, "rank")
    other.switch(False)
    now = 2.0
    assert clock.take() == 0.0
    other.switch(True)
    elsewhere = Wait(clock, "another rank")
    now = 5.0
    assert clock.take() == 6.0
    answer.end()
    other.end()
    now = 6.0
    assert clock.take() == 1.0
    elsewhere.switch(False)
    now = 7.0
    assert clock.take() == 0.0
