"""Bring shards to the first rank, in the pieces of a file and in their order.

A rank holds some rows of each tensor. A few pieces are on their way ahead of the one that is used.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from tlt.models.weight_leaves import Cut, Layout, Piece, flatten
from tlt.trainer.collectives import translate_errors

_AHEAD = 64


def gather_pieces(shards: Mapping[str, Tensor], layout: Layout) -> Iterator[Piece]:
    """Yield pieces to the first rank; all ranks have to iterate to the end."""
    mesh = cast("DTensor", next(iter(shards.values()))).device_mesh
    if any((mesh.get_coordinate() or [])[:-1]):
        return  # a replica
    group = mesh.get_group(mesh.ndim - 1)
    coming = deque[tuple[Tensor, list[dist.Work]]]()
    for cut in layout.cuts():
        coming.append(_start(cut, cast("DTensor", shards[cut.name]), group))
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
    share = -(-shard.shape[0] // ranks) * shard.shape[1:].numel()
    for owner in range(cut.begin // share, (cut.end - 1) // share + 1):
        first = owner * share
        yield owner, first, max(cut.begin, first), min(cut.end, first + share)


def _finish(piece: Tensor, works: list[dist.Work], group: ProcessGroup) -> Iterator[Piece]:
    with translate_errors("gathering a weight"):
        for work in works:
            work.wait()
    if group.rank() == 0:
        yield lambda: piece
