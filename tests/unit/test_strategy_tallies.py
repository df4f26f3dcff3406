"""Tallies add up to what was decoded, and a control run is reported as a whole."""

from random import Random

from tlt.base.id_types import DrafterVersion
from tlt.base.strategies import Draft, Off
from tlt.policies.speculation.strategy_policy import Choice
from tlt.policies.speculation.strategy_tallies import TallyCollector
from tlt.protocol.shared_values import ControlRuns, StrategyTally

CONTROL = Choice(Off(), 0.0, "control")
BEST = Choice(Draft(depth=4), 100.0, "best")
DRAFTER = DrafterVersion(3)


def controlled(tallies: tuple[StrategyTally, ...]) -> dict[int, ControlRuns]:
    return {tally.bucket: tally.control for tally in tallies if tally.control is not None}


def test_reports_a_control_run_once_it_is_over() -> None:
    tallies = TallyCollector()
    tallies.add(BEST, DRAFTER, 4, 12, 0.25, 0.25, 0.0)
    for _ in range(3):
        tallies.add(CONTROL, None, 4, 4, 0.125, 0.125, 0.0625)
    assert controlled(tallies.take(idle=False)) == {}
    tallies.add(CONTROL, None, 4, 4, 0.125, 0.125, 0.0625)
    tallies.add(BEST, DRAFTER, 4, 12, 0.25, 0.25, 0.0)
    (runs,) = controlled(tallies.take(idle=False)).values()
    assert runs == ControlRuns(count=1, steps_squared=16, seconds_squared=0.0625, product=1.0)


def test_counts_a_control_run_where_it_began_and_cuts_it_at_the_end() -> None:
    tallies = TallyCollector()
    for rows in (6, 5, 4, 4, 3):
        tallies.add(CONTROL, None, rows, rows, 1.0, 1.0, 0.25)
    (tally,) = tallies.take(idle=True)
    assert (tally.bucket, tally.steps, tally.rows, tally.tokens) == (8, 5, 22, 22)
    assert (tally.seconds, tally.overhead) == (5.0, 1.25)
    # the seconds of a run are those of plain decoding
    runs = ControlRuns(count=1, steps_squared=25, seconds_squared=3.75**2, product=5 * 3.75)
    assert tally.control == runs
    assert tallies.take(idle=True) == ()


def test_reports_every_decode_step_once() -> None:
    dice, tallies = Random(0), TallyCollector()
    taken: list[StrategyTally] = []
    steps = rows = tokens = 0
    for _ in range(2000):
        choice = dice.choice([CONTROL, CONTROL, BEST, Choice(Off(), 1.0, "explore")])
        batch, got = dice.randint(1, 64), dice.randint(1, 9)
        drafter = DRAFTER if choice is BEST else None
        tallies.add(choice, drafter, batch, got, 0.5, 0.5, 0.125)
        steps, rows, tokens = steps + 1, rows + batch, tokens + got
        if dice.random() < 0.1:
            taken += tallies.take(idle=False)
    taken += tallies.take(idle=True)
    assert sum(tally.steps for tally in taken) == steps
    assert sum(tally.rows for tally in taken) == rows
    assert sum(tally.tokens for tally in taken) == tokens
    assert sum(tally.seconds for tally in taken) == steps / 2
    assert sum(tally.overhead for tally in taken) == steps / 8
    assert {(tally.strategy, tally.drafter) for tally in taken} == {
        (Off(), None),
        (Draft(depth=4), DRAFTER),
    }
