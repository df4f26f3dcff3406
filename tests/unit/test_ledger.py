"""Savings and acceptance of single steps agree with figures computed by hand."""

import pytest

from tests.properties.test_keeping_answers import started
from tests.samples import JOB, tally
from tlt.base.id_types import DrafterVersion, Incarnation, Step, WorkerId
from tlt.base.strategies import Draft, Ngram, Off
from tlt.policies.run.run_state import Duty
from tlt.policies.speculation.plain_replay import Replay
from tlt.policies.speculation.plain_step_costs import PlainStepCosts
from tlt.policies.speculation.savings_estimate import (
    DecodeAccount,
    add_tallies,
    plain_step_costs,
)
from tlt.protocol.events import DecodingReported
from tlt.protocol.refs import DrafterSpan, OriginSpan
from tlt.protocol.shared_values import ControlRuns
from tlt.ranks.accepted_counts import count_accepted
from tlt.report.acceptance import AcceptedTokens
from tlt.report.step_savings import StepSavings
from tlt.report.time_by_duty import TimeByDuty

W0, W1 = WorkerId("w0"), WorkerId("w1")


def decoding_report(
    worker: WorkerId, tokens: int, seconds: float, rank: int = 0
) -> DecodingReported:
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


def test_tools_take_their_seconds_from_the_rollout() -> None:
    """They never take more than the step has: an answer may tell of the step before."""
    time = TimeByDuty()
    state, _ = started("off")
    assert state.workers[W0].duty is Duty.ROLLOUT
    time.pass_time(state, 10.0)
    time.wait_for_tools(W0, 4.0)
    time.wait_for_tools(W0, 20.0)
    time.wait_for_tools(WorkerId("unknown"), 1.0)
    assert time.workers()[W0] == {"rollout": 0.0, "tools": 10.0}


def plain_costs() -> PlainStepCosts:
    """Plain steps take one second, whatever their rows."""
    runs = ControlRuns(count=100, steps_squared=100.0, seconds_squared=100.0, product=100.0)
    plain = [
        tally(0, 100.0, steps=100, rows=100 * rows, bucket=rows, strategy=Off(), control=runs)
        for rows in (1, 2, 4)
    ]
    costs = plain_step_costs(add_tallies(DecodeAccount(), plain, beside_training=False))
    assert costs is not None
    return costs


def test_compares_a_step_with_its_replay() -> None:
    """Both ranks save 30 s of 60; the rank that ended last saves 20 s of its 40."""
    savings = StepSavings()
    savings.add(decoding_report(W0, 100, 10.0))
    savings.add(decoding_report(W1, 70, 15.0))
    savings.add(decoding_report(W1, 50, 5.0))
    savings.finish_answer(Step(0), W0)
    savings.finish_answer(Step(0), W1)
    savings.close_batch(Step(0), "train", Replay(steps={2: 40.0, 1: 20.0}, last={2: 40.0}))
    saved, critical = savings.of(Step(0), plain_costs())
    assert saved is not None
    assert critical is not None
    assert saved.seconds == pytest.approx(30.0, rel=0.01)
    assert critical.seconds == pytest.approx(20.0, rel=0.01)


def test_waits_for_the_busiest_rank_of_the_last_worker() -> None:
    savings = StepSavings()
    for rank, seconds in ((0, 3.0), (1, 9.0)):
        savings.add(decoding_report(W1, 10, seconds, rank=rank))
    savings.add(decoding_report(W0, 10, 20.0))
    savings.finish_answer(Step(0), W1)
    savings.close_batch(Step(0), "train", Replay(steps={1: 40.0}, last={1: 30.0}))
    _, critical = savings.of(Step(0), plain_costs())
    assert critical is not None
    assert critical.seconds == pytest.approx(30.0 - 9.0, rel=0.01)


def test_claims_nothing_for_a_step_that_was_not_replayed() -> None:
    savings = StepSavings()
    savings.add(decoding_report(W0, 100, 10.0))
    savings.finish_answer(Step(0), W0)
    assert savings.of(Step(0), plain_costs()) == (None, None)
    savings.close_batch(Step(0), "train", None)
    assert savings.of(Step(0), plain_costs()) == (None, None)
    savings.close_batch(Step(0), "train", Replay(steps={1: 5.0}, last={1: 5.0}))
    assert savings.of(Step(0), None) == (None, None)
    assert savings.of(Step(1), plain_costs()) == (None, None)


def test_counts_accepted_tokens_by_position() -> None:
    """Two steps accept two tokens and none; then plain tokens; a last step accepts three."""
    accepted = AcceptedTokens()
    spans = [("accepted", 2), ("corrected", 2), ("plain", 5), ("accepted", 3)]
    accepted.add_answer(
        count_accepted([OriginSpan(origin=origin, tokens=tokens) for origin, tokens in spans])
    )
    assert accepted.positions() == pytest.approx((2 / 3, 2 / 3, 1 / 3))
    assert AcceptedTokens().positions() == AcceptedTokens().by_drafter() == ()


def test_counts_positions_of_each_drafter() -> None:
    """A drafter is swapped in the middle of an answer; n-grams propose another answer."""
    accepted = AcceptedTokens()
    spans = [("accepted", 2), ("corrected", 1), ("accepted", 1), ("corrected", 3)]
    origins = [OriginSpan(origin=origin, tokens=tokens) for origin, tokens in spans]
    swapped = [(DrafterVersion(0), 3), (DrafterVersion(1), 4)]
    accepted.add_answer(
        count_accepted(origins, [DrafterSpan(version=v, tokens=n) for v, n in swapped])
    )
    accepted.add_answer(count_accepted(origins, [DrafterSpan(version=None, tokens=7)]))
    found = [(each.drafter, each.steps, each.shares) for each in accepted.by_drafter()]
    assert found == [(None, 4, (0.5, 0.25)), (0, 1, (1.0, 1.0)), (1, 3, (1 / 3,))]
    assert accepted.positions() == pytest.approx((4 / 8, 2 / 8))


def test_counts_rejections_for_the_drafter_that_proposed() -> None:
    accepted = AcceptedTokens()
    origins = [OriginSpan(origin="accepted", tokens=2), OriginSpan(origin="corrected", tokens=4)]
    swapped = [(DrafterVersion(0), 4), (DrafterVersion(1), 1), (DrafterVersion(2), 1)]
    accepted.add_answer(
        count_accepted(origins, [DrafterSpan(version=v, tokens=n) for v, n in swapped])
    )
    found = [(each.drafter, each.steps, each.shares) for each in accepted.by_drafter()]
    assert found == [(0, 2, (0.5, 0.5)), (1, 1, ()), (2, 1, ())]


def test_sums_acceptance_by_proposer_and_bucket() -> None:
    accepted = AcceptedTokens()
    accepted.add_tallies(
        [
            tally(30, 1.0, rows=10),
            tally(25, 1.0, rows=10, strategy=Draft(depth=6)),
            tally(8, 1.0, rows=8, strategy=Off(), drafter=None),
            tally(9, 1.0, rows=8, strategy=Ngram(tokens=4), drafter=None, bucket=4),
        ]
    )
    found = [(a.proposer, a.drafter, a.bucket, a.tokens / a.rows) for a in accepted.table()]
    assert found == [("drafter", 0, 1, 2.75), ("ngram", None, 4, 1.125)]
