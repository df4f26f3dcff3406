"""Ranks that hold rows of tensors write the file that one rank with all rows would."""

import tempfile
import time
from collections import deque
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.trainer.models import CPU
from tests.trainer.second_rank import Peer
from tlt.blobs import blob_files
from tlt.blobs.blob_digest import LEAF_BYTES, LEAVES_AHEAD, Leaf
from tlt.blobs.blob_files import Blobs
from tlt.errors import BlobError, RankError
from tlt.models.safetensors_io import put_weights
from tlt.models.weight_leaves import Layout
from tlt.protocol.refs import BlobRef
from tlt.trainer import process_group as groups
from tlt.trainer import shard_files
from tlt.trainer.shard_files import put_shards

SECONDS = 1000.0
# of a collective, where a disk is slow
DEADLINE = 4.0
RESERVED = 1
# of a file that is larger than what is in use at once, and pieces on their way
LEAVES, AHEAD = 40, 4
# rows that fill neither pages nor leaves, and fewer rows than ranks
SHAPES = [(7, 333), (1, 5), (1_500_001,), (3, 300, 1111), (2, 2)]


def draw() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {str(n): torch.randn(shape, generator=generator) for n, shape in enumerate(SHAPES)}


def write(
    rank: int,
    rendezvous: str,
    folder: Path,
    removed: str = "",
    commit: bool = False,
    deadline: float = SECONDS,
) -> BlobRef | None:
    """Write this rank's rows, without one of both ways."""
    group = groups.join_group(rendezvous, "rows", rank, 2, deadline, CPU)
    assert group is not None
    mesh = DeviceMesh.from_group(group, "cpu")
    shards = {name: distribute_tensor(each, mesh, [Shard(0)]) for name, each in draw().items()}
    layout = Layout({name: (each.shape, torch.bfloat16) for name, each in shards.items()})
    blobs = Blobs(folder / "flight", folder / "committed", reserved_bytes=lambda: RESERVED)
    try:
        with pytest.MonkeyPatch.context() as patch:
            if removed:
                patch.delattr(shard_files, removed)
            return put_shards(blobs, shards, layout, commit=commit)
    finally:
        groups.leave_group()


def write_elsewhere(rendezvous: str, folder: Path) -> BlobRef | None:
    """Write as a rank does that doesn't see the first one's files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "exists", lambda _: False)
        return write(1, rendezvous, folder, "_write_together")


def leaves_of_memory(rank: int, rendezvous: str, folder: Path, commit: bool) -> float:
    """Write rows of many leaves, and return how many leaves of memory that takes at most."""
    group = groups.join_group(rendezvous, "rows", rank, 2, SECONDS, CPU)
    assert group is not None
    rows = torch.full((LEAVES * LEAF_BYTES // 2 // 2,), float(rank))
    shard = DTensor.from_local(rows, DeviceMesh.from_group(group, "cpu"), [Shard(0)])
    layout = Layout({"weight": (shard.shape, torch.bfloat16)})
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shard_files, "_AHEAD", AHEAD)
            Path("/proc/self/clear_refs").write_text("5")
            before = memory("VmRSS")
            put_shards(Blobs(folder / "flight", folder), {"weight": shard}, layout, commit=commit)
            return (memory("VmHWM") - before) / LEAF_BYTES
    finally:
        groups.leave_group()


def memory(name: str) -> int:
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name)]
    return int(line.split()[1]) << 10


def expected(folder: Path, commit: bool) -> BlobRef:
    whole = {name: each.bfloat16() for name, each in draw().items()}
    return put_weights(Blobs(folder / "flight", folder / "committed"), whole, commit=commit)


@pytest.mark.parametrize(("commit", "unused"), [(False, "_start"), (True, "_write_together")])
def test_ranks_that_see_a_file_in_flight_write_into_it(
    peer: Peer, rendezvous: str, tmp_path: Path, commit: bool, unused: str
) -> None:
    peer.tell(write, 1, rendezvous, tmp_path, unused, commit)
    ref = write(0, rendezvous, tmp_path, unused, commit)
    assert peer.answer() is None
    assert ref == expected(tmp_path, commit)
    assert Blobs(tmp_path / "flight", tmp_path / "committed").verify(ref)


def test_a_rank_that_does_not_see_the_file_sends_its_rows(
    peer: Peer, rendezvous: str, tmp_path: Path
) -> None:
    peer.tell(write_elsewhere, rendezvous, tmp_path)
    assert write(0, rendezvous, tmp_path, "_write_together") == expected(tmp_path, False)
    assert peer.answer() is None


@pytest.mark.parametrize(("commit", "ahead"), [(False, 0), (True, AHEAD)])
def test_ranks_need_little_memory_beside_their_rows(
    peer: Peer, rendezvous: str, tmp_path: Path, commit: bool, ahead: int
) -> None:
    peer.tell(leaves_of_memory, 1, rendezvous, tmp_path, commit)
    most = max(leaves_of_memory(0, rendezvous, tmp_path, commit), peer.answer())
    assert most < ahead + LEAVES_AHEAD + 4 < LEAVES / 2


def fail_to_write(rank: int, rendezvous: str, folder: Path) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_files, "write_share", fail)
        write(rank, rendezvous, folder)


@pytest.mark.parametrize("failing", [0, 1])
def test_all_raise_if_one_rank_cannot_write(
    peer: Peer, rendezvous: str, tmp_path: Path, failing: int
) -> None:
    """None waits until a collective's deadline, which is longer than the test may take."""
    functions = [write, write]
    functions[failing] = fail_to_write  # pyright: ignore
    peer.tell(functions[1], 1, rendezvous, tmp_path)
    with pytest.raises(BlobError):
        functions[0](0, rendezvous, tmp_path)
    with pytest.raises(BlobError):
        peer.answer()
    assert list((tmp_path / "flight").iterdir()) == []


@pytest.mark.parametrize("commit", [False, True])
@pytest.mark.parametrize("seen", [True, False])
def test_all_raise_if_the_first_rank_cannot_give_the_file_its_name(
    peer: Peer,
    rendezvous: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    commit: bool,
    seen: bool,
) -> None:
    """Others would go on to the optimiser's state, and wait there."""

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    if seen:
        peer.tell(write, 1, rendezvous, tmp_path, "", commit)
    else:
        peer.tell(write_elsewhere, rendezvous, tmp_path)
        commit = False
    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(BlobError, match="Input/output"):
        write(0, rendezvous, tmp_path, commit=commit)
    with pytest.raises(RankError, match="another rank"):
        peer.answer()


@pytest.mark.parametrize("at", [0, 5])
def test_all_raise_if_the_first_rank_cannot_write_what_it_gathers(
    peer: Peer, rendezvous: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Others have sent some rows, and send the rest."""

    def fail(file: Path, leaves: Iterable[Leaf], _: object) -> None:
        deque(islice(leaves, at), maxlen=0)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shard_files, "write_leaves", fail)
    peer.tell(write, 1, rendezvous, tmp_path, "", True)
    with pytest.raises(BlobError, match="No space"):
        write(0, rendezvous, tmp_path, commit=True)
    with pytest.raises(RankError, match="another rank"):
        peer.answer()


def test_all_raise_if_the_first_rank_has_no_room(
    peer: Peer, rendezvous: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer.tell(write, 1, rendezvous, tmp_path)
    monkeypatch.setattr(blob_files, "free_bytes", lambda _: 0)
    with pytest.raises(BlobError, match="kept free"):
        write(0, rendezvous, tmp_path)
    with pytest.raises(BlobError, match="could not begin"):
        peer.answer()


def test_all_raise_if_the_first_rank_cannot_begin_a_committed_file(
    peer: Peer, rendezvous: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer.tell(write, 1, rendezvous, tmp_path, "", True)

    def fail(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "mkstemp", fail)
    with pytest.raises(BlobError, match="Read-only"):
        write(0, rendezvous, tmp_path, commit=True)
    with pytest.raises(RankError, match="another rank"):
        peer.answer()


def test_the_first_rank_may_sync_a_file_for_longer_than_a_collective_may_take(
    peer: Peer, rendezvous: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = expected(tmp_path / "whole", True)
    monkeypatch.setattr(blob_files, "_sync", lambda _: time.sleep(DEADLINE + 1.0))
    peer.tell(write, 1, rendezvous, tmp_path, "", True, DEADLINE)
    ref = write(0, rendezvous, tmp_path, commit=True, deadline=DEADLINE)
    assert peer.answer() is None
    assert ref == whole
