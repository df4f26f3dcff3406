"""Bind the C kernel of what a layer computes between its products, in float32 on a CPU.

A step of a small batch is a thousand calls of torch, which take longer than what they compute.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F

from tlt.kernels.c_build import build_kernels

_SOURCE = Path(__file__).with_name("layer_parts.c")


class LayerKernel:
    """Functions of addresses and sizes, which layer_parts.c describes."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, long, real = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
        self.normalise = library.normalise
        self.normalise.argtypes = (pointer, pointer, long, long, real)
        self.gate = library.gate
        self.gate.argtypes = (pointer, long, long)
        self.rotate = library.rotate
        self.rotate.argtypes = (pointer, long, pointer, long, long, long)
        self.cache_entries = library.cache_entries
        self.cache_entries.argtypes = (pointer, long, long, long, long, pointer, pointer)


def find_kernel(like: torch.Tensor) -> LayerKernel | None:
    """Return the kernel, or None where only torch fits: other dtypes and devices."""
    return kernel() if like.device.type == "cpu" and like.dtype == torch.float32 else None


@cache
def kernel() -> LayerKernel | None:
    """Build the C kernel, or log why that fails and return None."""
    return build_kernels([_SOURCE], LayerKernel, _agrees_with_torch)


def _agrees_with_torch(compiled: LayerKernel) -> bool:
    drawn = torch.randn(3, 2 * 40, generator=torch.Generator().manual_seed(0))
    normed, gated, turned = torch.empty_like(drawn), drawn.clone(), drawn.clone()
    turns = torch.polar(torch.ones(3, 4), drawn[:, :4])
    entries = torch.zeros(6, 40)
    rows = torch.tensor([5, 0, 1, 2, 4, 3])
    compiled.normalise(drawn.data_ptr(), normed.data_ptr(), 3, 80, 0.5)
    compiled.gate(gated.data_ptr(), 3, 40)
    compiled.rotate(turned.data_ptr(), 80, turns.data_ptr(), 3, 9, 8)
    compiled.cache_entries(drawn.data_ptr(), 80, 3, 2, 40, entries.data_ptr(), rows.data_ptr())
    length = (drawn.square().sum(1, keepdim=True) + 0.25).sqrt()
    heads = drawn.view(3, 10, 4, 2).clone()
    heads[:, :9] = torch.view_as_real(torch.view_as_complex(heads[:, :9]) * turns[:, None])
    pairs = (
        (normed, drawn / length),
        (gated[:, :40], F.silu(drawn[:, :40]) * drawn[:, 40:]),
        (turned, heads.view(3, 80)),
        (entries[rows], drawn.view(6, 40)),
    )
    return all(torch.allclose(found, right, rtol=1e-3, atol=1e-3) for found, right in pairs)
