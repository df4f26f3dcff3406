"""Strategies of the last half minute are listed with their predicted and measured speed."""

import msgspec

from tests.unit.test_ledger import W0, decoding_report, tally
from tlt.base.strategies import Draft, Ngram, Off
from tlt.protocol.events import DecodingReported
from tlt.protocol.shared_values import ControlRuns
from tlt.report import StrategyUsage


def report(*tallies: object) -> DecodingReported:
    return msgspec.structs.replace(decoding_report(W0, 1, 1.0), tallies=tallies)


def test_lists_predicted_and_measured_speed_by_strategy() -> None:
    usage = StrategyUsage()
    usage.add(report(tally(30, 1.0, expected=28.0, steps=10), tally(30, 2.0, expected=62.0)), 1.0)
    control = ControlRuns(count=1, steps_squared=1.0, seconds_squared=1.0, product=1.0)
    plain = tally(10, 1.0, strategy=Off(), drafter=None, control=control)
    usage.add(report(plain, tally(8, 1.0, strategy=Ngram(tokens=4), expected=9.0)), 2.0)
    found = {(row.name, row.control): (row.predicted, row.measured) for row in usage.table()}
    assert found == {
        ("draft 2 with noise", False): (30.0, 20.0),
        ("n-gram 4", False): (9.0, 8.0),
        ("no speculation", True): (0.0, 10.0),
    }
    assert usage.why() == (
        "For 1 row most decode steps used draft 2 with noise lately, each rank with "
        "30 tokens/s predicted, 20 measured. N-gram 4: 9 tokens/s predicted, 8 measured. "
        "Without speculation, in control runs: 10 measured."
    )


def test_forgets_steps_older_than_half_a_minute() -> None:
    usage = StrategyUsage()
    usage.add(report(tally(30, 1.0)), 1.0)
    usage.add(report(tally(30, 1.0, strategy=Draft(depth=8))), 40.0)
    assert [row.name for row in usage.table()] == ["draft 8 with noise"]
    assert StrategyUsage().why() == ""
