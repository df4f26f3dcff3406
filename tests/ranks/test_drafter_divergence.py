"""A member whose drafter diverges, or can't be written, reports that and starts over."""

import dataclasses
import itertools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.members import (
    FIRST,
    NEW,
    OTHER,
    engine_of,
    merge,
    merged,
    only,
    publish,
    train,
)
from tests.ranks.ranks import rank_job
from tlt.base.interrupt_check import never_interrupt
from tlt.models.safetensors_io import put_weights
from tlt.policies.drafter.training_evidence import Judgement, judge_evaluation
from tlt.protocol.events import DrafterDeltaReady, DrafterDiverged, DrafterTrainingStopped
from tlt.protocol.refs import BlobRef
from tlt.ranks.drafter.member import DrafterMember, MemberEvent
from tlt.ranks.main import Rank
from tlt.trainer.drafter.drafter_learner import DrafterLearner, MicroBatchResult


def replace_results(patch: pytest.MonkeyPatch, changes: Iterable[dict[str, Any]]) -> None:
    """Replace fields in the results of the learner's micro-batches."""
    learn, following = DrafterLearner.learn, iter(changes)

    def learn_and_replace(*arguments: Any) -> MicroBatchResult:
        return dataclasses.replace(learn(*arguments), **next(following))

    patch.setattr(DrafterLearner, "learn", learn_and_replace)


def test_reports_micro_batches_that_are_not_finite(
    member: DrafterMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(member, NEW)
    with monkeypatch.context() as context:
        replace_results(context, itertools.repeat({"loss": math.nan, "skipped": True}))
        events: list[MemberEvent] = []
        while member.is_training:
            events += member.step(never_interrupt)
    diverged = only(events, DrafterDiverged)
    assert diverged.base == FIRST
    assert "in a row were not finite" in diverged.error
    member.begin(train(OTHER))
    assert member.step(never_interrupt) == []
    assert member.publisher.updates == 1


def test_reports_forgetting_however_short_its_training_sessions_are(
    member: DrafterMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(member, NEW)
    overlaps = itertools.chain(itertools.repeat(0.8, 20), itertools.repeat(0.1))
    replace_results(monkeypatch, ({"overlap": (overlap,)} for overlap in overlaps))
    diverged: list[MemberEvent] = []
    for session in range(2, 20):
        member.begin(train(NEW, session))
        for _ in range(3):
            events = member.step(never_interrupt) if member.is_training else []
            diverged += [event for event in events if isinstance(event, DrafterDiverged)]
        member.stop(session)
        if diverged:
            break
    # the median needs fifteen micro-batches, more than one session has here
    assert session > 5
    error = only(diverged, DrafterDiverged).error
    assert error.startswith("it covers 10% of the policy's guesses")
    member.begin(train(OTHER, 30))
    member.step(never_interrupt)
    assert member.is_training


def test_a_new_lineage_is_not_compared_with_the_one_that_was_given_up(
    member: DrafterMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(member, NEW)
    overlaps = itertools.chain(itertools.repeat(0.9, 20), itertools.repeat(0.1))
    replace_results(monkeypatch, ({"overlap": (overlap,)} for overlap in overlaps))

    def learn(micro_batches: int) -> None:
        before = 0
        while micro_batches:
            events = member.step(never_interrupt)
            assert not any(isinstance(event, DrafterDiverged) for event in events)
            found = member.publisher.updates
            published = sum(e.updates for e in events if isinstance(e, DrafterDeltaReady))
            micro_batches -= found - before + published
            before = found

    learn(20)
    member.begin(train(OTHER, 2))
    learn(20)
    assert member.is_training


def test_a_loss_that_is_no_number_is_not_reported(
    member: DrafterMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = publish(member, NEW)
    skipped = [{"loss": math.nan, "skipped": True}, {}, {"loss": math.inf, "skipped": True}]
    replace_results(monkeypatch, skipped)
    assert not [event for _ in skipped for event in member.step(never_interrupt)]
    published, stopped = member.stop(1)
    assert isinstance(published, DrafterDeltaReady)
    assert (first.updates, published.updates) == (2, 1)
    assert math.isfinite(published.loss)
    assert isinstance(stopped, DrafterTrainingStopped)
    assert stopped.dropped_seconds > 0.0


@pytest.mark.parametrize("work", ["publishing", "merging"])
def test_gives_up_when_nothing_can_be_written(
    member: DrafterMember, work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = publish(member, NEW)
    if work == "merging":
        member.request_merge(merge(NEW, 1, published))
    else:
        member.step(never_interrupt)
    monkeypatch.setattr("tlt.blobs.blob_files.free_bytes", lambda folder: 0)
    events = member.step(never_interrupt) if work == "merging" else member.stop(1)[:1]
    assert "cannot be written" in only(events, DrafterDiverged).error
    assert not member.is_training


def test_leaves_room_for_policies(
    two_ranks: tuple[Rank, Rank], member: DrafterMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Publishing needs space for three policies, and rollouts need as much as one."""
    room = 4 * engine_of(two_ranks[0]).policy_bytes
    monkeypatch.setattr("tlt.blobs.blob_files.free_bytes", lambda folder: room)
    published = publish(member, NEW)
    room -= 1
    member.request_merge(merge(NEW, 1, published))
    diverged = only(member.step(never_interrupt), DrafterDiverged)
    assert "are kept free for policies" in diverged.error


def test_merges_without_an_answer_to_evaluate_on(
    member: DrafterMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = publish(member, NEW)
    monkeypatch.setattr(member.replay, "evaluation_answers", list)
    event = merged(member, merge(NEW, 1, published))
    assert event.evaluation.answers == 0
    assert judge_evaluation(event.evaluation) is Judgement.UNMEASURED
    member.begin(train(event.base))
    member.step(never_interrupt)
    assert member.is_training


def test_checks_for_interrupts_while_it_writes(
    member: DrafterMember, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    member.request_merge(merge(NEW, 1, publish(member, NEW)))

    def put(*arguments: Any, **settings: Any) -> BlobRef:
        calls.append("put")
        return put_weights(*arguments, **settings)

    monkeypatch.setattr("tlt.ranks.drafter.merger.put_weights", put)
    member.step(lambda: calls.append("check"))
    # before the first write, for each leaf before and after it is written, and before it is named
    assert calls[-9:] == ["check", *2 * ["put", "check", "check", "check"]]
    assert rank_job(tmp_path).flight.exists()
