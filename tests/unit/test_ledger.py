"""What the ledger makes of a single step, by hand."""

import pytest

from tests.samples import JOB, tally
from tests.simulation.specs import small_spec
from tlt.ids import DrafterVersion, Incarnation, Step, WorkerId
from tlt.policies.coordinator import new_run
from tlt.policies.speculation.savings_estimate import PlainRates, add_tallies
from tlt.protocol.events import DecodingReported
from tlt.protocol.records import ControlRuns
from tlt.protocol.refs import DrafterSpan, OriginSpan
from tlt.report.accepted_tokens import Accepted
from tlt.report.savings import Savings
from tlt.strategies import Draft, Ngram, Off

W0, W1 = WorkerId("w0"), WorkerId("w1")


def chosen(worker: WorkerId, tokens: int, seconds: float, rank: int = 0) -> DecodingReported:
    return DecodingReported(
        job=JOB,
        worker=worker,
        incarnation=Incarnation(1),
        rank=rank,
        serial=1,
        step=Step(0),
        purpose="train",
        tallies=(tally(tokens, seconds),),
    )


def test_only_the_last_to_finish_saves_of_the_tail() -> None:
    """A plain token takes a second. Together they save 60 s, then one waits 50 s less."""
    runs = ControlRuns(count=2, tokens_squared=2.0, seconds_squared=2.0, product=2.0)
    plain = tally(2, 2.0, strategy=Off(), drafter=None, control=runs)
    rates = PlainRates(add_tallies({}, [plain]))
    savings = Savings()
    savings.opens(new_run(JOB, small_spec()))
    savings._steps[Step(0)].ranks = 3
    for worker, tokens in ((W0, 60), (W1, 20)):
        savings.add(chosen(worker, tokens, 10.0), 10.0)
    savings.idles(Step(0), 10.0)
    savings.add(chosen(W0, 100, 10.0), 20.0)
    savings.add(chosen(W1, 70, 20.0, rank=0), 30.0)
    savings.add(chosen(W1, 50, 10.0, rank=1), 30.0)
    savings.finishes(Step(0), W1)
    in_all, critical = savings.of(Step(0), rates)
    assert in_all is not None
    assert critical is not None
    assert in_all.seconds == pytest.approx(60 + 90 + 50 + 40)
    assert critical.seconds == pytest.approx(60 / 3 + 50)


def test_what_was_decoded_around_the_moment_when_somebody_ran_out_is_divided() -> None:
    """Of 50 s that the last one saves in ten seconds, three go by while both decode."""
    runs = ControlRuns(count=2, tokens_squared=2.0, seconds_squared=2.0, product=2.0)
    plain = tally(2, 2.0, strategy=Off(), drafter=None, control=runs)
    savings = Savings()
    savings.opens(new_run(JOB, small_spec()))
    savings._steps[Step(0)].ranks = 2
    savings.idles(Step(0), 3.0)
    savings.idles(Step(0), 9.0)
    savings.add(chosen(W1, 60, 10.0), 10.0)
    # heard at that moment: all of it lies before
    savings.add(chosen(W0, 12, 2.0), 3.0)
    savings.finishes(Step(0), W1)
    in_all, critical = savings.of(Step(0), PlainRates(add_tallies({}, [plain])))
    assert in_all is not None
    assert critical is not None
    assert in_all.seconds == pytest.approx(50 + 10)
    assert critical.seconds == pytest.approx((0.3 * 50 + 10) / 2 + 0.7 * 50)


def test_how_far_drafts_are_accepted() -> None:
    """Two rounds that accept two and none; plain tokens; one that accepts three and ends."""
    accepted = Accepted()
    spans = [("accepted", 2), ("corrected", 2), ("plain", 5), ("accepted", 3)]
    accepted.follow([OriginSpan(origin=origin, tokens=tokens) for origin, tokens in spans])
    assert accepted.positions() == pytest.approx((2 / 3, 2 / 3, 1 / 3))
    assert Accepted().positions() == Accepted().by_drafter() == ()


def test_how_far_each_drafters_drafts_are_accepted() -> None:
    """A drafter is swapped in the middle of an answer; another answer is guessed by n-grams."""
    accepted = Accepted()
    spans = [("accepted", 2), ("corrected", 1), ("accepted", 1), ("corrected", 3)]
    origins = [OriginSpan(origin=origin, tokens=tokens) for origin, tokens in spans]
    swapped = [(DrafterVersion(0), 3), (DrafterVersion(1), 4)]
    accepted.follow(origins, [DrafterSpan(version=v, tokens=n) for v, n in swapped])
    accepted.follow(origins, [DrafterSpan(version=None, tokens=7)])
    found = [(each.drafter, each.rounds, each.shares) for each in accepted.by_drafter()]
    assert found == [(None, 4, (0.5, 0.25)), (0, 1, (1.0, 1.0)), (1, 3, (1 / 3,))]
    assert accepted.positions() == pytest.approx((4 / 8, 2 / 8))


def test_a_drafter_that_is_swapped_among_refusals_has_those_that_are_its_own() -> None:
    accepted = Accepted()
    origins = [OriginSpan(origin="accepted", tokens=2), OriginSpan(origin="corrected", tokens=4)]
    swapped = [(DrafterVersion(0), 4), (DrafterVersion(1), 1), (DrafterVersion(2), 1)]
    accepted.follow(origins, [DrafterSpan(version=v, tokens=n) for v, n in swapped])
    found = [(each.drafter, each.rounds, each.shares) for each in accepted.by_drafter()]
    assert found == [(0, 2, (0.5, 0.5)), (1, 1, ()), (2, 1, ())]


def test_acceptance_by_who_drafted_and_for_how_many() -> None:
    accepted = Accepted()
    accepted.add(
        [
            tally(30, 1.0, rows=10),
            tally(25, 1.0, rows=10, strategy=Draft(depth=6)),
            tally(8, 1.0, rows=8, strategy=Off(), drafter=None),
            tally(9, 1.0, rows=8, strategy=Ngram(tokens=4), drafter=None, bucket=4),
        ]
    )
    found = [(a.by, a.drafter, a.bucket, a.tokens / a.rows) for a in accepted.table()]
    assert found == [("drafter", 0, 1, 2.75), ("ngram", None, 4, 1.125)]
