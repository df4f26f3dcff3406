"""Savings and acceptance of single steps agree with figures computed by hand."""

import msgspec
import pytest

from tests.samples import JOB, tally
from tests.simulation.specs import small_spec
from tlt.id_types import DrafterVersion, Incarnation, Step, WorkerId
from tlt.policies.coordinator import new_run
from tlt.policies.job.run_state import RunState, WorkerState
from tlt.policies.speculation.savings_estimate import PlainRates, add_tallies
from tlt.protocol.events import DecodingReported
from tlt.protocol.refs import DrafterSpan, OriginSpan
from tlt.protocol.shared_values import ControlRuns, WorkerInfo
from tlt.report.acceptance import AcceptedTokens
from tlt.report.step_savings import StepSavings
from tlt.strategies import Draft, Ngram, Off

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


def state_with_ranks(ranks: int) -> RunState:
    info = WorkerInfo(worker=W0, incarnation=Incarnation(1), ranks=ranks, host="", rendezvous="")
    workers = {W0: WorkerState(info=info)}
    return msgspec.structs.replace(new_run(JOB, small_spec()), workers=workers)


def test_only_the_last_worker_saves_in_the_tail() -> None:
    """Plain tokens take 1 s each: both save 60 s together, then the last one waits 50 s less."""
    runs = ControlRuns(count=2, tokens_squared=2.0, seconds_squared=2.0, product=2.0)
    plain = tally(2, 2.0, strategy=Off(), drafter=None, control=runs)
    rates = PlainRates(add_tallies({}, [plain]))
    savings = StepSavings()
    savings.open_batch(state_with_ranks(3))
    for worker, tokens in ((W0, 60), (W1, 20)):
        savings.add(decoding_report(worker, tokens, 10.0), 10.0)
    savings.idle_worker(Step(0), 10.0)
    savings.add(decoding_report(W0, 100, 10.0), 20.0)
    savings.add(decoding_report(W1, 70, 20.0, rank=0), 30.0)
    savings.add(decoding_report(W1, 50, 10.0, rank=1), 30.0)
    savings.finish_answer(Step(0), W1)
    saved, critical = savings.of(Step(0), rates)
    assert saved is not None
    assert critical is not None
    assert saved.seconds == pytest.approx(60 + 90 + 50 + 40)
    assert critical.seconds == pytest.approx(60 / 3 + 50)


def test_divides_a_report_at_the_moment_when_a_worker_ran_out() -> None:
    """The last worker saves 50 s in ten seconds, during three of which both decode."""
    runs = ControlRuns(count=2, tokens_squared=2.0, seconds_squared=2.0, product=2.0)
    plain = tally(2, 2.0, strategy=Off(), drafter=None, control=runs)
    savings = StepSavings()
    savings.open_batch(state_with_ranks(2))
    savings.idle_worker(Step(0), 3.0)
    savings.idle_worker(Step(0), 9.0)
    savings.add(decoding_report(W1, 60, 10.0), 10.0)
    # reported at that moment, so all of its time is before
    savings.add(decoding_report(W0, 12, 2.0), 3.0)
    savings.finish_answer(Step(0), W1)
    saved, critical = savings.of(Step(0), PlainRates(add_tallies({}, [plain])))
    assert saved is not None
    assert critical is not None
    assert saved.seconds == pytest.approx(50 + 10)
    assert critical.seconds == pytest.approx((0.3 * 50 + 10) / 2 + 0.7 * 50)


def test_counts_accepted_tokens_by_position() -> None:
    """Two steps accept two tokens and none; then plain tokens; a last step accepts three."""
    accepted = AcceptedTokens()
    spans = [("accepted", 2), ("corrected", 2), ("plain", 5), ("accepted", 3)]
    accepted.add_answer([OriginSpan(origin=origin, tokens=tokens) for origin, tokens in spans])
    assert accepted.positions() == pytest.approx((2 / 3, 2 / 3, 1 / 3))
    assert AcceptedTokens().positions() == AcceptedTokens().by_drafter() == ()


def test_counts_positions_of_each_drafter() -> None:
    """A drafter is swapped in the middle of an answer; n-grams propose another answer."""
    accepted = AcceptedTokens()
    spans = [("accepted", 2), ("corrected", 1), ("accepted", 1), ("corrected", 3)]
    origins = [OriginSpan(origin=origin, tokens=tokens) for origin, tokens in spans]
    swapped = [(DrafterVersion(0), 3), (DrafterVersion(1), 4)]
    accepted.add_answer(origins, [DrafterSpan(version=v, tokens=n) for v, n in swapped])
    accepted.add_answer(origins, [DrafterSpan(version=None, tokens=7)])
    found = [(each.drafter, each.steps, each.shares) for each in accepted.by_drafter()]
    assert found == [(None, 4, (0.5, 0.25)), (0, 1, (1.0, 1.0)), (1, 3, (1 / 3,))]
    assert accepted.positions() == pytest.approx((4 / 8, 2 / 8))


def test_counts_rejections_for_the_drafter_that_proposed() -> None:
    accepted = AcceptedTokens()
    origins = [OriginSpan(origin="accepted", tokens=2), OriginSpan(origin="corrected", tokens=4)]
    swapped = [(DrafterVersion(0), 4), (DrafterVersion(1), 1), (DrafterVersion(2), 1)]
    accepted.add_answer(origins, [DrafterSpan(version=v, tokens=n) for v, n in swapped])
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
