"""A collective either succeeds or raises RankError; without a group it does nothing.

Errors of torch.distributed are translated here and nowhere else. A communicator that failed is
never used again: its members leave, and a new group is formed under another name.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tlt.errors import RankError

# elements that travel in one collective; a larger tensor travels alone
BUCKET_ELEMENTS = 2**26


@contextmanager
def translate_errors(what: str) -> Generator[None]:
    try:
        yield
    except RuntimeError as error:
        first, *_ = str(error).splitlines() or [""]
        raise RankError(f"{what} failed: {first}") from error


# torch 2.13 has another name for it
_gather_rows: Any = vars(dist).get("all_gather_single") or vars(dist)["all_gather_into_tensor"]


def reduce_sum(tensor: Tensor, group: ProcessGroup | None) -> None:
    if group is None:
        return
    with translate_errors("a sum over the ranks"):
        dist.all_reduce(tensor, group=group)


def reduce_max(tensor: Tensor, group: ProcessGroup | None) -> None:
    if group is None:
        return
    with translate_errors("a maximum over the ranks"):
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)


def wait_for_all(group: ProcessGroup | None, device: torch.device) -> None:
    """Wait until every rank has come here."""
    # the sum is known only once all have given their part, and reading it waits for that
    total = torch.ones((), device=device)
    reduce_sum(total, group)
    total.item()


def broadcast(tensors: Sequence[Tensor], source: int, group: ProcessGroup | None) -> None:
    """Overwrite every rank's `tensors` with those of rank `source`."""
    if group is None:
        return
    for bucket in split_into_buckets(tensors):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
        with translate_errors(f"a broadcast from rank {source}"):
            dist.broadcast(flat, group=group, group_src=source)
        for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            tensor.detach().copy_(part.view_as(tensor))


def gather_bytes(data: bytes, group: ProcessGroup, device: torch.device) -> list[bytes]:
    """Return the bytes of every rank, in the order of the ranks."""
    size = torch.tensor(len(data), device=device)
    reduce_max(size, group)
    width = int(size.item()) + 8
    padded = len(data).to_bytes(8, "big") + data
    own = torch.zeros(width, dtype=torch.uint8, device=device)
    own[: len(padded)] = torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(device)
    rows = own.new_empty(group.size() * width)
    with translate_errors("a gathering over the ranks"):
        _gather_rows(rows, own, group=group)
    found = [bytes(row.tolist()) for row in rows.view(group.size(), width)]
    return [row[8 : 8 + int.from_bytes(row[:8], "big")] for row in found]


def split_into_buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.numel() > BUCKET_ELEMENTS:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket
