"""Ways of decoding, as they were foretold and seen lately."""

import msgspec

from tests.unit.test_ledger import W0, chosen, tally
from tlt.protocol.events import DecodingReported
from tlt.protocol.records import ControlRuns
from tlt.report import Ways
from tlt.strategies import Draft, Ngram, Off


def said(*tallies: object) -> DecodingReported:
    return msgspec.structs.replace(chosen(W0, 1, 1.0), tallies=tallies)


def test_predicted_and_seen_by_rows_and_way() -> None:
    ways = Ways()
    ways.add(said(tally(30, 1.0, expected=28.0, steps=10), tally(30, 2.0, expected=62.0)), 1.0)
    control = ControlRuns(count=1, tokens_squared=1.0, seconds_squared=1.0, product=1.0)
    plain = tally(10, 1.0, strategy=Off(), drafter=None, control=control)
    ways.add(said(plain, tally(8, 1.0, strategy=Ngram(tokens=4), expected=9.0)), 2.0)
    found = {(way.name, way.control): (way.predicted, way.seen) for way in ways.table()}
    assert found == {
        ("draft 2 with noise", False): (30.0, 20.0),
        ("n-gram 4", False): (9.0, 8.0),
        ("no guessing", True): (0.0, 10.0),
    }
    assert ways.why() == (
        "For 1 row most rounds decoded with draft 2 with noise lately, each rank with "
        "30 tokens/s predicted, 20 seen. N-gram 4: 9 tokens/s predicted, 8 seen. "
        "Without guessing, in control runs: 10 seen."
    )


def test_what_is_half_a_minute_old_is_forgotten() -> None:
    ways = Ways()
    ways.add(said(tally(30, 1.0)), 1.0)
    ways.add(said(tally(30, 1.0, strategy=Draft(depth=8))), 40.0)
    assert [way.name for way in ways.table()] == ["draft 8 with noise"]
    assert Ways().why() == ""
