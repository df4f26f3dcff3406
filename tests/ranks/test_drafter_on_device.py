"""A rank trains, merges and evaluates drafters on an accelerator as it does on a CPU."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.labelled_device import CUDA, LabelledDevice, labelled_device
from tests.ranks.members import (
    NEW,
    decode,
    engine_of,
    member_of,
    member_spec,
    merge,
    merged,
    publish,
    train,
)
from tests.ranks.ranks import local_rank, open_job
from tests.trainer.drafters import keep
from tlt.base.id_types import PromptIndex, Step
from tlt.base.interrupt_check import never_interrupt
from tlt.protocol.events import DrafterMerged
from tlt.protocol.refs import DrafterBase
from tlt.ranks.drafter.member import DrafterMember
from tlt.ranks.main import Rank

HELD_OUT, TRAINED = PromptIndex(7), PromptIndex(8)


@pytest.fixture
def device() -> Iterator[LabelledDevice]:
    with labelled_device() as found:
        yield found


@pytest.fixture
def rank(device: LabelledDevice, tmp_path: Path) -> Iterator[Rank]:
    """Yield a rank with four answers to learn from, and four that evaluate drafters."""
    with local_rank(tmp_path, device="cuda:0") as local:
        local.rank.handle(open_job(tmp_path, member_spec(tmp_path, most_tokens=24)))
        for prompt in (HELD_OUT, TRAINED):
            decode(local.rank, prompt)
        yield local.rank


def merge_once(member: DrafterMember, base: DrafterBase, version: int) -> DrafterMerged:
    """Learn two micro-batches, then merge and evaluate them on the held-out answers."""
    published = publish(member, base)
    member.begin(msgspec.structs.replace(train(base), held_out={Step(0): (HELD_OUT,)}))
    return merged(member, merge(base, version, published))


def test_a_micro_batch_waits_for_the_device_four_times(rank: Rank, device: LabelledDevice) -> None:
    """Its numbers, its states and its measured rows go there, and its loss comes back."""
    member = member_of(rank)
    member.begin(train(NEW))
    member.step(never_interrupt)
    device.syncs.clear()
    assert member.step(never_interrupt) == []
    assert member.publisher.updates == 2
    assert (device.count("upload"), device.count("read", "wait")) == (3, 1)


def test_what_deltas_are_computed_from_lies_on_the_host(rank: Rank) -> None:
    member = member_of(rank)
    publish(member, merge_once(member, NEW, 1).base)
    tracker = member.trainer.tracker
    assert tracker is not None
    delta, snapshot = tracker.take_delta(9, keep), tracker.learner.snapshot()
    kept = delta.tensors, snapshot.tensors, tracker.root.tensors
    assert {tensor.device.type for tensors in kept for tensor in tensors.values()} == {"cpu"}


def test_trains_merges_evaluates_and_adopts(rank: Rank) -> None:
    member = member_of(rank)
    first = merge_once(member, NEW, 1)
    assert first.evaluation.answers == 4
    assert first.evaluation.accept_length_before is None
    assert first.evaluation.accept_length >= 1
    assert member.in_use.adopt(first.drafter) is None
    second = merge_once(member, first.base, 2)
    assert second.evaluation.accept_length_before == pytest.approx(first.evaluation.accept_length)
    assert member.in_use.drafter is not None
    assert next(member.in_use.drafter.parameters()).device == CUDA
    decode(rank, 9)
    assert engine_of(rank).drafter_version == 1
