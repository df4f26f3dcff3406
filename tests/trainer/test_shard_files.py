"""Ranks that hold rows of tensors write the file that one rank with all rows would."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.trainer.models import CPU
from tests.trainer.second_rank import Peer
from tlt.blobs.blob_files import Blobs
from tlt.errors import BlobError, RankError
from tlt.models.safetensors_io import put_weights
from tlt.models.weight_leaves import Layout
from tlt.protocol.refs import BlobRef
from tlt.trainer import process_group as groups
from tlt.trainer import shard_files
from tlt.trainer.shard_files import put_shards

SECONDS = 60.0
# rows that fill neither pages nor leaves, and fewer rows than ranks
SHAPES = [(7, 333), (1, 5), (1_500_001,), (3, 300, 1111), (2, 2)]


def draw() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {str(n): torch.randn(shape, generator=generator) for n, shape in enumerate(SHAPES)}


def write(rank: int, rendezvous: str, folder: Path, removed: str, host: str) -> BlobRef | None:
    """Write this rank's rows, on a host of this name, without one of both ways."""
    group = groups.join_group(rendezvous, "rows", rank, 2, SECONDS, CPU)
    assert group is not None
    mesh = DeviceMesh.from_group(group, "cpu")
    shards = {name: distribute_tensor(each, mesh, [Shard(0)]) for name, each in draw().items()}
    layout = Layout({name: (each.shape, torch.bfloat16) for name, each in shards.items()})
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shard_files, "_host", lambda: host)
            patch.delattr(shard_files, removed)
            return put_shards(Blobs(folder, folder / "none"), shards, layout, commit=False)
    finally:
        groups.leave_group()


@pytest.mark.parametrize(
    ("removed", "other_host"), [("_gather", "one"), ("_write_together", "another")]
)
def test_ranks_of_a_host_write_into_one_file_and_others_send_their_rows(
    peer: Peer, rendezvous: str, tmp_path: Path, removed: str, other_host: str
) -> None:
    peer.tell(write, 1, rendezvous, tmp_path, removed, other_host)
    ref = write(0, rendezvous, tmp_path, removed, "one")
    assert peer.answer() is None
    blobs = Blobs(tmp_path, tmp_path / "none")
    whole = {name: each.bfloat16() for name, each in draw().items()}
    assert ref == put_weights(blobs, whole, commit=False)
    assert ref is not None
    assert blobs.verify(ref)


def fail_to_write(rendezvous: str, folder: Path) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_files, "write_share", fail)
        write(1, rendezvous, folder, "_gather", "one")


def test_a_rank_that_cannot_write_ends_the_update_of_all(
    peer: Peer, rendezvous: str, tmp_path: Path
) -> None:
    peer.tell(fail_to_write, rendezvous, tmp_path)
    with pytest.raises(RankError):
        write(0, rendezvous, tmp_path, "_gather", "one")
    with pytest.raises(BlobError, match="No space left"):
        peer.answer()
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".unfinished")] == []
