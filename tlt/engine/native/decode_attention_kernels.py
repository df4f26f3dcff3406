"""Attention kernels for windows of equally many tokens: torch's, or our own C on a CPU.

torch's kernel takes rows of one length, so its inputs are cut into segments and padded. Ours takes
each row at its own length and reads the cache once.
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
# limits of the C kernel: the widest head, the unit of widths, the shortest cache
_WIDEST, _UNIT, _SHORTEST = 256, 4, 8


class PassAttention(Protocol):
    """The attention of one pass, laid out for all of its layers."""

    def attend(self, layer: int) -> torch.Tensor:
        """Return [..., width]: the output of each token's heads."""
        ...


class AttentionInputs(NamedTuple):
    """Queries, keys and values per layer, and a mask of some rows."""

    queries: torch.Tensor
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    mask: torch.Tensor | None


class TorchWindowAttention:
    """Attention by torch; each part is as wide as its longest row."""

    def __init__(self, parts: Sequence[AttentionInputs], scale: float) -> None:
        self._parts = parts
        self._scale = scale

    def attend(self, layer: int) -> torch.Tensor:
        outputs = [
            F.scaled_dot_product_attention(
                # heads that share keys become more queries
                part.queries.flatten(1, 2).transpose(1, 2),
                part.keys[layer],
                part.values[layer],
                attn_mask=part.mask,
                scale=self._scale,
            ).transpose(1, 2)
            for part in self._parts
        ]
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat([output.flatten(0, 1) for output in outputs])


class CacheLayout(NamedTuple):
    """The address of each layer's entries: rows x (keys of all heads, then values) x positions."""

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
        """Return scratch memory (64 bytes a position), shared by all engines of the process."""
        floats = self._scratch_floats(positions)
        if len(self._scratch) < floats:
            self._scratch = torch.empty(floats, dtype=torch.float32)
        return self._scratch


class CompiledWindowAttention:
    """Attention by our C kernel, in float32 and on one thread, however many torch uses."""

    def __init__(
        self,
        kernel: AttentionKernel,
        layout: CacheLayout,
        queries: torch.Tensor,
        positions: torch.Tensor,
        scale: float,
    ) -> None:
        """Take queries [tokens, heads, width] for positions [rows, window] of the first rows."""
        _, heads, width = queries.shape
        self._attend = kernel.attend
        self._addresses = layout.addresses
        if queries.stride()[1:] != (width, 1):
            raise NotImplementedError(f"queries of strides {queries.stride()}")
        self._out = torch.empty(queries.shape, dtype=torch.float32)
        positions = positions.contiguous()
        scratch = kernel.scratch(layout.positions)
        # pointers don't keep their tensors alive
        self._kept = (queries, positions, scratch)
        self._queries = (queries.data_ptr(), queries.stride(0))
        self._others = (
            *(positions.data_ptr(), *positions.shape),
            *(heads, layout.kv_heads, width, layout.positions, scale),
            *(scratch.data_ptr(), self._out.data_ptr()),
        )

    def attend(self, layer: int) -> torch.Tensor:
        if self._attend(*self._queries, self._addresses[layer], *self._others):
            raise NotImplementedError(f"attention with heads of {self._out.shape[-1]}")
        return self._out


def find_kernel(
    width: int, positions: int, dtype: torch.dtype, device: torch.device
) -> AttentionKernel | None:
    """Return the C kernel, or None where only torch fits: other dtypes, devices, heads."""
    fits = (
        device.type == "cpu"
        and dtype == torch.float32
        and width % _UNIT == 0
        and width <= _WIDEST
        and positions >= _SHORTEST
    )
    return kernel() if fits else None


@cache
def kernel() -> AttentionKernel | None:
    """Build the C kernel, or log why that fails and return None."""
    return build_kernels([_SOURCE], AttentionKernel, _agrees_with_reference)


def _agrees_with_reference(compiled: AttentionKernel) -> bool:
    generator = torch.Generator().manual_seed(0)
    kv_heads, members, capacity = 2, 3, 40
    for width, window in ((4, 1), (8, 2), (16, 4), (32, 1), (32, 4), (32, 7)):
        # shorter and longer than the block of keys that the kernel scores at once
        positions = torch.tensor([[0], [3], [30]]) + torch.arange(window)
        shape = (len(positions), 2 * kv_heads, capacity, width)
        entries = torch.randn(shape, generator=generator)
        queries = torch.randn((positions.numel(), kv_heads * members, width), generator=generator)
        layout = CacheLayout([entries.data_ptr()], kv_heads, capacity)
        attention = CompiledWindowAttention(compiled, layout, queries, positions, 0.3)
        expected = reference_attention(queries, entries, positions, 0.3)
        if not torch.allclose(attention.attend(0), expected, rtol=1e-3, atol=1e-3):
            return False
    return True


def reference_attention(
    queries: torch.Tensor, entries: torch.Tensor, positions: torch.Tensor, scale: float
) -> torch.Tensor:
    """Compute attention query by query over entries [rows, keys and values, positions, width]."""
    out = torch.empty_like(queries)
    keys, values = entries.chunk(2, dim=1)
    for token, position in enumerate(positions.flatten().tolist()):
        row = token // positions.shape[1]
        for head, query in enumerate(queries[token]):
            shared = head % keys.shape[1]
            scores = keys[row, shared, : position + 1] @ query * scale
            out[token, head] = scores.softmax(0) @ values[row, shared, : position + 1]
    return out
