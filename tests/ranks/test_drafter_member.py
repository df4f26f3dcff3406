"""A member's work is merged once, and neither a stop nor an interrupt loses any of it."""

import itertools
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from tests.interrupts import interrupting_checks
from tests.ranks.members import (
    LONG_MICRO_BATCH,
    NEW,
    OTHER,
    interrupt,
    merge,
    merged,
    only,
    publish,
    publish_now,
    train,
)
from tests.ranks.ranks import rank_job
from tlt.base.interrupt_check import Interrupted, never_interrupt
from tlt.models.safetensors_io import read_weights
from tlt.protocol.events import DrafterDeltaReady, DrafterMerged, DrafterTrainingStopped
from tlt.ranks.drafter.delta_publisher import DeltaPublisher
from tlt.ranks.drafter.member import DrafterMember


@pytest.fixture
def files(tmp_path: Path) -> Callable[[], list[Path]]:
    """Return a function that lists the blobs in shared memory."""
    flight = rank_job(tmp_path).flight
    return lambda: sorted(path for path in flight.glob("[!.]*") if path.is_file())


def learn_long(member: DrafterMember) -> None:
    """Learn a micro-batch, and count one that took so long that a delta is due."""
    member.begin(train(NEW))
    assert member.step(never_interrupt) == []
    member.publisher.add(LONG_MICRO_BATCH)


def test_counts_a_delta_that_is_merged_late_once(
    member: DrafterMember, peer: DrafterMember, tmp_path: Path
) -> None:
    """The delta was learned on an older base; its member has moved to a newer one since."""
    own, late = publish(member, NEW), publish(peer, NEW)
    second = merged(member, merge(NEW, 1, own)).base
    peer.trainer.move_to(second, never_interrupt)
    member.begin(train(second))
    third = merged(member, merge(second, 2, late)).base
    learner = peer.trainer.move_to(third, never_interrupt).learner
    assert third.weights is not None
    expected = read_weights(rank_job(tmp_path).blobs(), third.weights)
    # what the format of the delta left out stays with the member
    torch.testing.assert_close(learner.snapshot().tensors, expected, rtol=1e-3, atol=1e-4)
    assert learner.updates == third.updates


def test_publishes_a_delta_that_an_interrupt_delayed(
    member: DrafterMember,
    files: Callable[[], list[Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learn_long(member)
    monkeypatch.setattr(DeltaPublisher, "is_quick", False)  # too large for a stop to wait for it
    before, tracker = files(), member.trainer.tracker
    assert tracker is not None
    expected = tracker.learner.snapshot().tensors
    for session, check in enumerate(itertools.islice(interrupting_checks(1), 4), 1):
        member.begin(train(NEW, session))
        with pytest.raises(Interrupted):
            member.step(check)
        assert files() == before
        stopped = only(member.stop(session), DrafterTrainingStopped)
        assert stopped.dropped_seconds == 0.0
    member.begin(train(NEW, 9))
    event = only(member.step(never_interrupt), DrafterDeltaReady)
    assert (event.training_session, event.updates, event.delta.number) == (9, 2, 0)
    assert event.delta.micro_batches == 1
    delta = read_weights(rank_job(tmp_path).blobs(), event.delta.blob)
    root = tracker.root.tensors
    for name, tensor in delta.items():
        torch.testing.assert_close(
            tensor.float(), expected[name] - root[name], rtol=0.01, atol=1e-6
        )


def test_a_stop_hands_in_work_that_is_not_due(member: DrafterMember) -> None:
    member.begin(train(NEW))
    assert member.step(never_interrupt) == []
    published, stopped = member.stop(1)
    assert isinstance(published, DrafterDeltaReady)
    assert (published.updates, published.delta.micro_batches) == (1, 1)
    assert published.seconds > 0.0
    assert isinstance(stopped, DrafterTrainingStopped)
    assert stopped.dropped_seconds == 0.0


def test_a_later_session_hands_in_work_that_a_stop_did_not_wait_for(
    member: DrafterMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    member.begin(train(NEW))
    assert member.step(never_interrupt) == []
    with monkeypatch.context() as context:
        context.setattr(DeltaPublisher, "is_quick", False)
        assert only(member.stop(1), DrafterTrainingStopped).dropped_seconds == 0.0
    member.begin(train(NEW, 2))
    published, _ = member.stop(2)
    assert isinstance(published, DrafterDeltaReady)
    assert (published.training_session, published.updates) == (2, 1)
    assert published.delta.micro_batches == 1


def test_publishes_after_many_interrupts(member: DrafterMember) -> None:
    learn_long(member)
    for _ in range(8):
        with pytest.raises(Interrupted):
            member.step(interrupt)
    only(member.step(interrupt), DrafterDeltaReady)


def test_publishes_after_many_interrupts_of_reading_a_new_base(member: DrafterMember) -> None:
    base = merged(member, merge(NEW, 1, publish(member, NEW))).base
    learn_long(member)
    member.begin(train(base))
    for _ in range(8):
        with pytest.raises(Interrupted):
            member.step(interrupt)
    assert only(member.step(interrupt), DrafterDeltaReady).delta.base == base.version


def test_publishes_without_anything_more_to_learn_from(
    member: DrafterMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn_long(member)
    with pytest.raises(Interrupted):
        member.step(interrupt)
    monkeypatch.setattr(member.replay, "draw", lambda rows, randoms: [])
    only(member.step(never_interrupt), DrafterDeltaReady)
    assert member.step(never_interrupt) == []
    assert member.lacks_answers


def test_merges_after_an_interrupt(member: DrafterMember) -> None:
    member.request_merge(merge(NEW, 1, publish(member, NEW)))
    with pytest.raises(Interrupted):
        member.step(interrupt)
    assert only(member.step(never_interrupt), DrafterMerged).base.version == 1
    assert not any(isinstance(event, DrafterMerged) for event in member.step(never_interrupt))


@pytest.mark.parametrize("over", ["session", "lineage"])
def test_ignores_merge_requests_of_an_earlier_session_or_lineage(
    member: DrafterMember, over: str
) -> None:
    published = publish(member, NEW)
    member.request_merge(merge(NEW, 1, published))
    if over == "session":
        member.stop(1)
        member.begin(train(NEW, 2))
    else:
        member.begin(train(OTHER))
    for _ in range(2):
        assert not any(isinstance(event, DrafterMerged) for event in member.step(never_interrupt))
    member.stop(2)
    member.stop(1)
    member.request_merge(merge(NEW, 1, published))
    assert not member.is_training


def test_an_interrupted_merge_leaves_no_file(
    member: DrafterMember, files: Callable[[], list[Path]]
) -> None:
    first = publish(member, NEW)
    trained = merged(member, merge(NEW, 1, first))
    member.begin(train(trained.base))
    second = publish(member, trained.base)
    member.request_merge(merge(trained.base, 2, second))
    before, interrupts = files(), 0
    for check in interrupting_checks(1):
        try:
            event = only(member.step(check), DrafterMerged)
        except Interrupted:
            interrupts += 1
            assert files() == before
        else:
            break
    # the base, the delta, the sum, the evaluation, two files and their checksums
    assert interrupts > 10
    assert event.base.micro_batches == first.updates + second.updates
    assert len(files()) == len(before) + 2


def test_reads_its_base_before_a_prefill_that_outlasts_it(
    member: DrafterMember, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = merged(member, merge(NEW, 1, publish(member, NEW))).base
    weights, read = base.weights, member.trainer.read
    assert weights is not None

    def release_and_read(*arguments: object) -> None:
        rank_job(tmp_path).blobs().release(weights)
        read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(member.trainer, "read", release_and_read)
    member.begin(train(base))
    assert member.step(never_interrupt) == []
    assert member.publisher.updates == 1


def test_drops_work_if_the_part_in_a_base_is_unknown(
    member: DrafterMember, peer: DrafterMember
) -> None:
    own, others = publish(member, NEW), publish(peer, NEW)
    base = merged(member, merge(NEW, 1, own, others)).base
    for _ in range(17):  # the first delta's snapshot is forgotten
        peer.publisher.add(LONG_MICRO_BATCH)
        publish_now(peer)
    peer.trainer.take_dropped_seconds()
    peer.publisher.add(LONG_MICRO_BATCH)
    peer.trainer.move_to(base, never_interrupt)
    assert peer.publisher.updates == 0
    assert peer.trainer.take_dropped_seconds() == 10.0


def test_drops_work_of_a_lineage_that_is_given_up(member: DrafterMember) -> None:
    learn_long(member)
    member.begin(train(OTHER))
    assert member.step(never_interrupt) == []
    published, stopped = member.stop(1)
    assert isinstance(published, DrafterDeltaReady)
    assert published.updates == published.delta.micro_batches == 1
    assert isinstance(stopped, DrafterTrainingStopped)
    assert stopped.dropped_seconds >= 10.0


def test_events_survive_the_wire(member: DrafterMember) -> None:
    event = merged(member, merge(NEW, 1, publish(member, NEW)))
    assert msgspec.json.decode(msgspec.json.encode(event), type=DrafterMerged) == event
