"""A drafter of a policy in bfloat16 is trained in float32, because small steps would be lost."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from tests.ranks.members import (
    FIRST,
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
from tests.ranks.ranks import local_rank, open_job, rank_job
from tlt.base.id_types import PromptIndex, Step
from tlt.base.interrupt_check import never_interrupt
from tlt.models.safetensors_io import read_weights
from tlt.protocol.events import DrafterMerged
from tlt.ranks.drafter.delta_base_reader import BaseReader
from tlt.ranks.main import Rank
from tlt.spec.config import JobSpec

HELD_OUT, TRAINED = PromptIndex(7), PromptIndex(8)


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    made = member_spec(tmp_path, most_tokens=24)
    return msgspec.structs.replace(
        made, policy=msgspec.structs.replace(made.policy, dtype="bfloat16")
    )


@pytest.fixture
def rank(spec: JobSpec, tmp_path: Path) -> Iterator[Rank]:
    with local_rank(tmp_path) as local:
        local.rank.handle(open_job(tmp_path, spec))
        for prompt in (HELD_OUT, TRAINED):
            decode(local.rank, prompt)
        yield local.rank


def merge_once(rank: Rank) -> DrafterMerged:
    member = member_of(rank)
    published = publish(member, NEW)
    member.begin(msgspec.structs.replace(train(NEW), held_out={Step(0): (HELD_OUT,)}))
    return merged(member, merge(NEW, 1, published))


def dtypes(tensors: dict[str, torch.Tensor]) -> set[torch.dtype]:
    return {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}


def test_weights_mean_and_moments_are_float32(rank: Rank) -> None:
    publish(member_of(rank), NEW)
    tracker = member_of(rank).trainer.tracker
    assert tracker is not None
    assert dtypes(tracker.learner.state()) == {torch.float32}


def test_the_mean_moves_however_long_it_is(rank: Rank) -> None:
    """The newest weights have a share of a two-hundredth in it, which bfloat16 rounds away."""
    member = member_of(rank)
    publish(member, NEW)
    tracker = member.trainer.tracker
    assert tracker is not None
    tracker.learner.updates = 5000
    before = tracker.learner.snapshot().tensors
    member.trainer.train(NEW, member.trainer.draw(), never_interrupt)
    after = tracker.learner.snapshot().tensors
    for name in before:
        moved = (after[name] != before[name]).float().mean()
        assert moved > 0.9, name


def test_merges_and_evaluates_what_the_engine_will_use(rank: Rank, tmp_path: Path) -> None:
    event = merge_once(rank)
    assert event.base.weights is not None
    blobs = rank_job(tmp_path).blobs()
    base = read_weights(blobs, event.base.weights)
    assert dtypes(base) == {torch.float32}
    assert dtypes(read_weights(blobs, event.drafter.weights)) == {torch.bfloat16}
    assert event.evaluation.answers == 4
    assert event.evaluation.accept_length >= 1
    member = member_of(rank)
    assert member.in_use.adopt(event.drafter) is None
    decode(rank, 9)
    assert engine_of(rank).drafter_version == 1


def test_a_lineage_that_begins_with_an_adopted_drafter_adds_in_float32(
    rank: Rank, tmp_path: Path
) -> None:
    event = merge_once(rank)
    base = msgspec.structs.replace(event.base, weights=event.drafter.weights, root=FIRST)
    reader = BaseReader(rank_job(tmp_path).blobs())
    assert dtypes(reader.read(base, None, never_interrupt).tensors) == {torch.float32}
