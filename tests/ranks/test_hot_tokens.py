"""The tokens that a drafter can propose travel with its base, and with what engines adopt."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from tests.ranks.members import NEW, member_of, member_ranks, merge, merged, publish
from tests.ranks.ranks import rank_job
from tlt.base.id_types import DrafterVersion
from tlt.base.interrupt_check import never_interrupt
from tlt.models.safetensors_io import read_weights
from tlt.protocol.refs import DrafterBase
from tlt.ranks.drafter.member import DrafterMember
from tlt.spec.config import DrafterSpec

HOT = 7


@pytest.fixture
def members(tmp_path: Path) -> Iterator[tuple[DrafterMember, DrafterMember]]:
    drafter = DrafterSpec(train="always", hot_tokens=HOT)
    with member_ranks(tmp_path, drafter) as (one, other):
        yield member_of(one), member_of(other)


def tokens_of(member: DrafterMember, base: DrafterBase) -> list[int]:
    tokens = member.trainer.move_to(base, never_interrupt).learner.drafter().tokens
    assert tokens is not None
    return tokens.tolist()


def test_all_members_follow_the_tokens_of_the_base(
    members: tuple[DrafterMember, DrafterMember], tmp_path: Path
) -> None:
    member, peer = members
    own, others = publish(member, NEW), publish(peer, NEW)
    chosen = tokens_of(member, NEW)
    assert len({*chosen}) == HOT
    event = merged(member, merge(NEW, 1, own, others))
    assert tokens_of(member, event.base) == tokens_of(peer, event.base) == chosen
    # a lineage that begins again does so from the drafter in use
    again = msgspec.structs.replace(
        event.base, version=DrafterVersion(2), root=DrafterVersion(2), weights=event.drafter.weights
    )
    assert tokens_of(peer, again) == chosen
    blobs = rank_job(tmp_path).blobs()
    assert member.in_use.adopt(event.drafter) is None
    assert member.in_use.drafter is not None
    assert member.in_use.drafter.tokens is not None
    assert member.in_use.drafter.tokens.tolist() == chosen
    offsets = torch.tensor(chosen) - torch.arange(HOT)
    assert torch.equal(read_weights(blobs, event.drafter.weights)["d2t"], offsets)
