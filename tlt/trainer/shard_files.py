"""Write tensors, of which each rank holds some rows, as one file.

Ranks that see the file write their rows into it, each from its own device. Where one doesn't, and
for a file to be committed, whose disk may not let several write, the first rank gets what others
hold, in the pieces of the file and in their order; a few pieces are on their way ahead of the one
that is used.
"""

import os
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from tlt.base.interrupt_check import never_interrupt
from tlt.blobs.blob_digest import name_sums, write_leaves, write_share
from tlt.blobs.blob_files import Blobs
from tlt.errors import BlobError, RankError
from tlt.models.weight_leaves import Cut, Layout, Part, Piece, flatten
from tlt.protocol.refs import BlobRef
from tlt.trainer.collectives import gather_bytes, reduce_max, reduce_sum, translate_errors
from tlt.trainer.process_group import wait_for_files

_AHEAD = 64

Shards = Mapping[str, DTensor]


def put_shards(blobs: Blobs, shards: Shards, layout: Layout, *, commit: bool) -> BlobRef | None:
    """Store a file, which the first rank names; the others help, and return None.

    All ranks of a copy raise if one can't store its part, so that none goes on and waits for it.
    """
    mesh = next(iter(shards.values())).device_mesh
    if any((mesh.get_coordinate() or [])[:-1]):  # a replica
        if commit:
            wait_for_files()
        return None
    group, ref, failure = mesh.get_group(mesh.ndim - 1), None, None
    try:
        if group.rank() == 0:
            ref = _put(blobs, shards, layout, group, commit)
        elif commit or (file := _common_file(None, group, _device(shards))) is None:
            deque(_gather(shards, layout, group), maxlen=0)
        else:
            _write_together(file, shards, layout, group)
    except BlobError as error:
        failure = error
    if commit:
        wait_for_files()  # the first rank syncs the file, and may upload it
    if _any_failed(failure, group, _device(shards)):
        raise failure or RankError("another rank could not store its part of the weights")
    return ref


def _put(
    blobs: Blobs, shards: Shards, layout: Layout, group: ProcessGroup, commit: bool
) -> BlobRef:
    """Store the first rank's file."""
    device, gathered = _device(shards), _gather(shards, layout, group)
    others = "send" if commit else "wait"

    def write(file: Path) -> BlobRef:
        nonlocal others
        if not commit:
            others = "send" if _common_file(file, group, device) is None else "write"
        if others == "write":
            return _write_together(file, shards, layout, group)
        return write_leaves(file, layout.leaves(gathered, device), never_interrupt)

    try:
        return blobs.put_written(write, commit=commit)
    except BlobError:
        if others == "wait":
            gather_bytes(b"", group, device)  # for the file's name
        elif others == "send":
            deque(gathered, maxlen=0)
        raise


def _write_together(file: Path, shards: Shards, layout: Layout, group: ProcessGroup) -> BlobRef:
    """Write this rank's rows; all raise if one can't."""
    parts, device = _own_parts(shards, layout, group), _device(shards)
    leaves = layout.share(parts, device, header=group.rank() == 0)
    sums, failure = np.zeros(0, np.uint64), None
    try:
        sums = write_share(file, leaves, layout.bytes, never_interrupt)
    except OSError as error:
        failure = BlobError(f"{file}: cannot be written: {error.strerror}")
    if _any_failed(failure, group, device):
        raise failure or BlobError(f"{file}: another rank could not write its rows")
    total = torch.from_numpy(sums.view(np.int64)).to(device)
    reduce_sum(total, group)
    return name_sums(total.cpu().numpy().view(np.uint64), layout.bytes)


def _any_failed(failure: Exception | None, group: ProcessGroup, device: torch.device) -> bool:
    failed = torch.tensor(float(failure is not None), device=device)
    reduce_max(failed, group)
    return bool(failed.item())


def _common_file(own: Path | None, group: ProcessGroup, device: torch.device) -> Path | None:
    """Return the first rank's file if all ranks see it."""
    first, *_ = gather_bytes(b"" if own is None else os.fsencode(own), group, device)
    if not first:
        raise BlobError("the first rank could not begin a file of weights")
    file = Path(os.fsdecode(first))
    found = gather_bytes(b"seen" if file.exists() else b"", group, device)
    return file if all(found) else None


def _own_parts(shards: Shards, layout: Layout, group: ProcessGroup) -> Iterator[Part]:
    for name, cuts in groupby(layout.cuts(), lambda cut: cut.name):
        shard, own = shards[name], flatten(shards[name].to_local())
        first = group.rank() * _share(shard, group.size())
        for cut in cuts:
            begin, end = max(cut.begin, first), min(cut.end, first + len(own))
            if begin < end:
                yield cut.part(begin, end), partial(_slice, own, begin - first, end - first)


def _gather(shards: Shards, layout: Layout, group: ProcessGroup) -> Iterator[Piece]:
    """Yield pieces to the first rank; all ranks have to iterate to the end."""
    coming = deque[tuple[Tensor, list[dist.Work]]]()
    for cut in layout.cuts():
        coming.append(_start(cut, shards[cut.name], group))
        if len(coming) > _AHEAD:
            yield from _finish(*coming.popleft(), group)
    while coming:
        yield from _finish(*coming.popleft(), group)


def _start(cut: Cut, shard: DTensor, group: ProcessGroup) -> tuple[Tensor, list[dist.Work]]:
    """Send what this rank has of a piece, or receive what others have; return what arrives."""
    rank, own, works = group.rank(), flatten(shard.to_local()), list[dist.Work | None]()
    piece = own.new_empty(cut.end - cut.begin if rank == 0 else 0, dtype=cut.dtype)
    with translate_errors("gathering a weight"):
        for owner, first, begin, end in _owners(cut, shard, group.size()):
            held = slice(begin - first, end - first)
            there = piece[begin - cut.begin : end - cut.begin]
            if rank == owner == 0:
                there.copy_(own[held])
            elif rank == owner:
                works.append(dist.isend(own[held].to(cut.dtype), group=group, group_dst=0))
            elif rank == 0:
                works.append(dist.irecv(there, group=group, group_src=owner))
    return piece, [work for work in works if work is not None]


def _owners(cut: Cut, shard: DTensor, ranks: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield who holds a part of a piece, the first element of its shard, and the part's ends."""
    share = _share(shard, ranks)
    for owner in range(cut.begin // share, (cut.end - 1) // share + 1):
        first = owner * share
        yield owner, first, max(cut.begin, first), min(cut.end, first + share)


def _finish(piece: Tensor, works: list[dist.Work], group: ProcessGroup) -> Iterator[Piece]:
    with translate_errors("gathering a weight"):
        for work in works:
            work.wait()
    if group.rank() == 0:
        yield lambda: piece


def _share(shard: DTensor, ranks: int) -> int:
    """Return the elements that each rank holds but the last ones, which may have fewer."""
    return -(-shard.shape[0] // ranks) * shard.shape[1:].numel()


def _slice(flat: Tensor, begin: int, end: int) -> Tensor:
    return flat[begin:end]


def _device(shards: Shards) -> torch.device:
    return next(iter(shards.values())).device
