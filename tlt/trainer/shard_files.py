"""Write tensors, of which each rank holds some rows, as one file.

Ranks that see the file write their rows into it, each from its own device. Where one is on another
host, the first rank writes the file, and gets what others hold in the pieces of the file and in
their order; a few pieces are on their way ahead of the one that is used.
"""

import os
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from tlt.base.interrupt_check import never_interrupt
from tlt.blobs.blob_digest import name_sums, write_leaves, write_share
from tlt.blobs.blob_files import Blobs
from tlt.errors import BlobError
from tlt.models.weight_leaves import Cut, Layout, Part, Piece, flatten
from tlt.protocol.refs import BlobRef
from tlt.trainer.collectives import gather_bytes, reduce_sum, translate_errors

_AHEAD = 64
_BOOT = Path("/proc/sys/kernel/random/boot_id")

Shards = Mapping[str, DTensor]


def put_shards(blobs: Blobs, shards: Shards, layout: Layout, *, commit: bool) -> BlobRef | None:
    """Store a file, which the first rank names; the others help, and return None."""
    mesh = next(iter(shards.values())).device_mesh
    if any((mesh.get_coordinate() or [])[:-1]):
        return None  # a replica
    group = mesh.get_group(mesh.ndim - 1)
    if group.rank() == 0:
        return blobs.put_written(lambda file: _write(file, shards, layout, group), commit=commit)
    if (common := _common_file(None, group, _device(shards))) is not None:
        _write_together(common, shards, layout, group)
    else:
        deque(_gather(shards, layout, group), maxlen=0)
    return None


def _write(file: Path, shards: Shards, layout: Layout, group: ProcessGroup) -> BlobRef:
    """Write the first rank's file."""
    if _common_file(file, group, _device(shards)) is not None:
        return _write_together(file, shards, layout, group)
    leaves = layout.leaves(_gather(shards, layout, group), _device(shards))
    return write_leaves(file, leaves, never_interrupt)


def _write_together(file: Path, shards: Shards, layout: Layout, group: ProcessGroup) -> BlobRef:
    """Write this rank's rows, and wait until all have."""
    parts, device = _own_parts(shards, layout, group), _device(shards)
    leaves = layout.share(parts, device, header=group.rank() == 0)
    try:
        sums = write_share(file, leaves, layout.bytes, never_interrupt)
    except OSError as error:
        raise BlobError(f"{file}: cannot be written: {error.strerror}") from error
    total = torch.from_numpy(sums.view(np.int64)).to(device)
    reduce_sum(total, group)
    return name_sums(total.cpu().numpy().view(np.uint64), layout.bytes)


def _common_file(own: Path | None, group: ProcessGroup, device: torch.device) -> Path | None:
    """Return the first rank's file if all ranks are on its host and see it.

    Hosts that share a disk would each write whole pages of it.
    """
    told = msgspec.json.encode((str(own), _host())) if own is not None else b""
    first, *_ = gather_bytes(told, group, device)
    name, host = msgspec.json.decode(first, type=tuple[str, str])
    seen = host == _host() and os.path.exists(name)
    found = gather_bytes(b"seen" if seen else b"", group, device)
    return Path(name) if all(found) else None


def _host() -> str:
    return _BOOT.read_text()


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
