"""An unusable drafter is refused, and the one in use stays."""

from pathlib import Path

import msgspec
import torch

from tests.ranks.members import NEW, decode, engine_of, merge, merged, publish
from tests.ranks.ranks import rank_job
from tlt.base.id_types import Digest, DrafterVersion
from tlt.base.strategies import Draft
from tlt.models.safetensors_io import put_weights, read_weights
from tlt.protocol.refs import BlobRef
from tlt.ranks.drafter.member import DrafterMember
from tlt.ranks.main import Rank


def test_refuses_a_drafter_that_cannot_be_used(
    two_ranks: tuple[Rank, Rank], member: DrafterMember, tmp_path: Path
) -> None:
    rank, blobs = two_ranks[0], rank_job(tmp_path).blobs()
    engine = engine_of(rank)
    good = merged(member, merge(NEW, 1, publish(member, NEW))).drafter
    assert member.in_use.adopt(good) is None
    weights = read_weights(blobs, good.weights)
    name = next(iter(weights))

    def put(tensor: torch.Tensor) -> BlobRef:
        return put_weights(blobs, {**weights, name: tensor}, commit=False)

    torn = put(weights[name] + 1)
    (blobs.flight / torn.digest).write_bytes(b"torn")
    for changes, complaint in (
        ({"weights": torn}, "4 bytes, "),
        ({"weights": put(weights[name][:1])}, "other names or shapes"),
        ({"weights": put(weights[name] / 0)}, "not finite"),
        ({"architecture": Digest("other")}, "another architecture"),
    ):
        refused = msgspec.structs.replace(good, version=DrafterVersion(2), **changes)
        assert complaint in (member.in_use.adopt(refused) or "")
        assert engine.speculation.drafter_version == 1
    assert member.in_use.adopt(None) is None
    assert engine.speculation.drafter_version is None
    decode(rank, 3)
    tallies = engine.take_strategy_tallies()
    assert tallies
    assert not any(isinstance(tally.strategy, Draft) for tally in tallies)
