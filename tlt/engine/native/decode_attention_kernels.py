"""How windows of the same number of tokens attend: by torch, or on a CPU by C of our own.

torch's kernel takes rows of one length, so what is laid out for it is cut into segments and padded;
C takes each row as long as it is, and reads what it needs of the cache once.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from tlt.kernels.c_build import build_kernels

_SOURCE = Path(__file__).with_name("decode_attention.c")
# heads and caches that C is made for
_WIDEST, _UNIT, _SHORTEST = 256, 4, 8


class PassAttention(Protocol):
    """What the queries of one pass attend with and to."""

    def attended(self, layer: int) -> torch.Tensor:
        """Token by token what its heads found, [..., width]."""
        ...


class AttentionInputs(NamedTuple):
    """What some rows attend with and to: queries; per layer keys and values; a mask."""

    queries: torch.Tensor
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    mask: torch.Tensor | None


class TorchWindowAttention:
    """By torch, each part as long as the longest of its rows."""

    def __init__(self, reads: Sequence[AttentionInputs], scale: float) -> None:
        self._reads = reads
        self._scale = scale

    def attended(self, layer: int) -> torch.Tensor:
        parts = [
            F.scaled_dot_product_attention(
                # the heads that share keys are so many more queries
                read.queries.flatten(1, 2).transpose(1, 2),
                read.keys[layer],
                read.values[layer],
                attn_mask=read.mask,
                scale=self._scale,
            ).transpose(1, 2)
            for read in self._reads
        ]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([part.flatten(0, 1) for part in parts])


class CacheLayout(NamedTuple):
    """Where each layer's entries begin: rows x (keys of all heads, then values) x positions."""

    addresses: Sequence[int]
    kv_heads: int
    positions: int


class AttentionKernel:
    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, long = ctypes.c_void_p, ctypes.c_long
        self.attend = library.attend_windows
        self.attend.argtypes = (
            *(pointer, long, pointer, pointer),
            *(long,) * 6,
            *(ctypes.c_float, pointer, pointer),
        )
        self._scratch_floats = library.attend_windows_scratch
        self._scratch_floats.argtypes = (long,)
        self._scratch_floats.restype = long
        self._scratch = torch.empty(0)

    def scratch(self, positions: int) -> torch.Tensor:
        """One for all engines of the process, which decode in turns: 64 bytes a position."""
        floats = self._scratch_floats(positions)
        if len(self._scratch) < floats:
            self._scratch = torch.empty(floats, dtype=torch.float32)
        return self._scratch


class CompiledWindowAttention:
    """By C, in float32 and on one thread."""

    def __init__(
        self,
        kernel: AttentionKernel,
        layout: CacheLayout,
        queries: torch.Tensor,
        positions: torch.Tensor,
        scale: float,
    ) -> None:
        """Queries [tokens, heads, width] for positions [rows, window] in each of the first rows."""
        _, heads, width = queries.shape
        self._attend = kernel.attend
        self._addresses = layout.addresses
        if queries.stride()[1:] != (width, 1):
            raise NotImplementedError(f"queries of strides {queries.stride()}")
        self._out = torch.empty(queries.shape, dtype=torch.float32)
        positions = positions.contiguous()
        scratch = kernel.scratch(layout.positions)
        # a pointer does not keep what it points to
        self._kept = (queries, positions, scratch)
        self._queries = (queries.data_ptr(), queries.stride(0))
        self._others = (
            *(positions.data_ptr(), *positions.shape),
            *(heads, layout.kv_heads, width, layout.positions, scale),
            *(scratch.data_ptr(), self._out.data_ptr()),
        )

    def attended(self, layer: int) -> torch.Tensor:
        if self._attend(*self._queries, self._addresses[layer], *self._others):
            raise NotImplementedError(f"attention with heads of {self._out.shape[-1]}")
        return self._out


def find_kernel(
    width: int, positions: int, dtype: torch.dtype, device: torch.device
) -> AttentionKernel | None:
    """None where torch does it: for other formats, devices and heads, or with several threads."""
    fits = (
        device.type == "cpu"
        and dtype == torch.float32
        and torch.get_num_threads() == 1
        and width % _UNIT == 0
        and width <= _WIDEST
        and positions >= _SHORTEST
    )
    return kernel() if fits else None


@cache
def kernel() -> AttentionKernel | None:
    """None, and one line in the log, where it cannot be had."""
    return build_kernels([_SOURCE], AttentionKernel, _agrees)


def _agrees(found: AttentionKernel) -> bool:
    dice = torch.Generator().manual_seed(0)
    kv_heads, members, capacity = 2, 3, 40
    # as many queries as each product is for
    for width, window in ((4, 1), (8, 2), (16, 4), (32, 1), (32, 4), (32, 7)):
        # fewer keys than are scored at once, and more
        positions = torch.tensor([[0], [3], [30]]) + torch.arange(window)
        shape = (len(positions), 2 * kv_heads, capacity, width)
        entries = torch.randn(shape, generator=dice)
        queries = torch.randn((positions.numel(), kv_heads * members, width), generator=dice)
        layout = CacheLayout([entries.data_ptr()], kv_heads, capacity)
        windows = CompiledWindowAttention(found, layout, queries, positions, 0.3)
        right = reference_attention(queries, entries, positions, 0.3)
        if not torch.allclose(windows.attended(0), right, rtol=1e-3, atol=1e-3):
            return False
    return True


def reference_attention(
    queries: torch.Tensor, entries: torch.Tensor, positions: torch.Tensor, scale: float
) -> torch.Tensor:
    """The same, a query at a time: for entries [rows, keys and values, positions, width]."""
    out = torch.empty_like(queries)
    keys, values = entries.chunk(2, dim=1)
    for token, place in enumerate(positions.flatten().tolist()):
        row = token // positions.shape[1]
        for head, query in enumerate(queries[token]):
            shared = head % keys.shape[1]
            scores = keys[row, shared, : place + 1] @ query * scale
            out[token, head] = scores.softmax(0) @ values[row, shared, : place + 1]
    return out
