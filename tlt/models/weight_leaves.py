"""Lay tensors out as the leaves of a safetensors file, which threads fill a few at a time.

Tensors may be on any device, and need not be in memory as a whole: a file's bytes are cut in the
order of the file, and what is asked for is a part of one tensor that lies in one leaf.
"""

import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, cycle, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tlt.blobs.blob_digest import LEAF_BYTES, LEAVES_AHEAD, Leaf

# what threads compute at once is then still in their core's cache
_CUT_BYTES = 256 << 10
_CPU = torch.device("cpu")
_TYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# each thread fills a buffer of its own
_buffers = threading.local()


class Cut(NamedTuple):
    """Some elements of a tensor, and their place in the file; the header has no name."""

    name: str
    begin: int
    end: int
    dtype: torch.dtype
    offset: int

    def part(self, begin: int, end: int) -> "Cut":
        """Return the cut's elements from `begin` to `end`."""
        offset = self.offset + (begin - self.begin) * self.dtype.itemsize
        return self._replace(begin=begin, end=end, offset=offset)


# computes the elements of a cut as a flat tensor, in any thread and in any format
Piece = Callable[[], Tensor]
Part = tuple[Cut, Piece]


class Layout:
    """The order, shapes and formats of a file's tensors; wide formats come first."""

    def __init__(self, tensors: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> None:
        # Transformers insists on the metadata
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._tensors = list[tuple[str, int, torch.dtype]]()
        end = 0
        for name, (shape, dtype) in sorted(tensors.items(), key=lambda item: -item[1][1].itemsize):
            count = math.prod(shape)
            begin, end = end, end + dtype.itemsize * count
            header[name] = {
                "dtype": _TYPE_NAMES[dtype],
                "shape": [*shape],
                "data_offsets": [begin, end],
            }
            self._tensors.append((name, count, dtype))
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        encoded = len(encoded).to_bytes(8, "little") + encoded
        self._header = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        self.bytes = len(encoded) + end

    def cuts(self) -> Iterator[Cut]:
        """Yield all elements of all tensors, in the order of the file."""
        return _cut(self._tensors, len(self._header))

    def leaves(self, pieces: Iterable[Piece], device: torch.device = _CPU) -> Iterator[Leaf]:
        """Yield the file's leaves; `pieces` are those of `cuts`, on this device."""
        parts = zip(self.cuts(), pieces, strict=True)
        return self._leaves(chain(self._header_parts(), parts), device)

    def share(self, parts: Iterable[Part], device: torch.device, *, header: bool) -> Iterator[Leaf]:
        """Yield a share of the file: some parts of its cuts, in their order."""
        return self._leaves(chain(self._header_parts() if header else (), parts), device)

    def _header_parts(self) -> Iterator[Part]:
        for cut in _cut([("", len(self._header), torch.uint8)], 0):
            yield cut, partial(_slice, self._header, cut)

    def _leaves(self, parts: Iterable[Part], device: torch.device) -> Iterator[Leaf]:
        runs = _runs(parts)
        if device.type == "cpu":
            return (Leaf(run[0][0].offset, partial(_fill_own, run)) for run in runs)
        return self._from_device(runs, device)

    def _from_device(self, runs: Iterable[list[Part]], device: torch.device) -> Iterator[Leaf]:
        """Fill pinned buffers by turns, because a device copies while its host does other work."""
        size = min(LEAF_BYTES, self.bytes)
        # a share may have several runs in a leaf, and each is in use until it is written
        buffers = [
            torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(LEAVES_AHEAD + 1)
        ]
        for buffer, run in zip(cycle(buffers), runs, strict=False):
            filled = _fill(buffer, run)
            torch.accelerator.synchronize(device)
            yield Leaf(run[0][0].offset, partial(memoryview, filled))


def pieces_of(layout: Layout, read: Callable[[str], Tensor]) -> Iterator[Piece]:
    """Yield the pieces of tensors, of which each is read once, when it is its turn."""
    for name, cuts in groupby(layout.cuts(), lambda cut: cut.name):
        flat = flatten(read(name))
        for cut in cuts:
            yield partial(_slice, flat, cut)


def flatten(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)


def _slice(flat: Tensor, cut: Cut) -> Tensor:
    return flat[cut.begin : cut.end]


def _runs(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Group parts that follow each other in one leaf."""
    run, end = list[Part](), 0
    for cut, piece in parts:
        if run and (cut.offset != end or end % LEAF_BYTES == 0):
            yield run
            run = []
        run.append((cut, piece))
        end = cut.offset + (cut.end - cut.begin) * cut.dtype.itemsize
    if run:
        yield run


def _cut(tensors: Iterable[tuple[str, int, torch.dtype]], offset: int) -> Iterator[Cut]:
    for name, count, dtype in tensors:
        begin = 0
        while begin < count:
            room = min(_CUT_BYTES, LEAF_BYTES - offset % LEAF_BYTES) // dtype.itemsize
            end = min(count, begin + room)
            yield Cut(name, begin, end, dtype, offset)
            begin, offset = end, offset + (end - begin) * dtype.itemsize


def _fill_own(run: list[Part]) -> memoryview:
    """Fill this thread's buffer."""
    if not hasattr(_buffers, "leaf"):
        _buffers.leaf = torch.empty(LEAF_BYTES, dtype=torch.uint8)
    return _fill(_buffers.leaf, run)


def _fill(buffer: Tensor, run: list[Part]) -> memoryview:
    first = end = run[0][0].offset % LEAF_BYTES
    for cut, piece in run:
        begin = cut.offset % LEAF_BYTES
        end = begin + (cut.end - cut.begin) * cut.dtype.itemsize
        made = piece()
        # copied to the host in another format, it would be converted there
        made = made if made.device.type == "cpu" else made.to(cut.dtype)
        buffer[begin:end].view(cut.dtype).copy_(made, non_blocking=True)
    return buffer[first:end].numpy().data
