"""Bind the C kernels that training uses: causal attention, RMS norms and gates.

Tensors are float32 and contiguous. C checks no shapes, so the binding refuses those that don't fit.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from tlt.kernels.c_build import build_kernels

_SOURCES = [Path(__file__).with_name(name) for name in ("causal_attention.c", "norms_and_gates.c")]


class TrainingKernels:
    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, long, real = ctypes.c_void_p, ctypes.c_long, ctypes.c_float

        def function(name: str, pointers: int, *others: type) -> Callable[..., int]:
            symbol = getattr(library, name)
            symbol.argtypes = (*(pointer,) * pointers, *others)
            return symbol

        self._attend = function("attend", 6, long, long, long, long, real)
        self._attend_backward = function("attend_backward", 10, long, long, long, long, real)
        self._norm = function("rms_norm", 4, long, long, real)
        self._norm_backward = function("rms_norm_backward", 6, long, long)
        self._gated = function("gated", 3, long)
        self._gated_backward = function("gated_backward", 5, long)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return the result and its log-sum-exps; tensors are tokens x heads x width."""
        sizes = _sizes(query, key, value, bounds)
        out, lse = torch.empty_like(query), query.new_empty(query.shape[:2])
        tensors = _pointers(query, key, value, out, lse, bounds)
        if self._attend(*tensors, *sizes, scale):
            raise MemoryError("no memory for the attention's scratch")
        return out, lse

    def attend_backward(
        self,
        slope: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        bounds: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        sizes = _sizes(query, key, value, bounds)
        slopes = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
        tensors = _pointers(slope, query, key, value, out, lse, *slopes, bounds)
        if self._attend_backward(*tensors, *sizes, scale):
            raise MemoryError("no memory for the attention's scratch")
        return slopes

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return the last dimension over its root mean square, and the inverse of that."""
        out, inverse = torch.empty_like(x), x.new_empty(x.shape[:-1])
        width = x.shape[-1]
        self._norm(*_pointers(x, weight, out, inverse), x.numel() // width, width, eps)
        return out, inverse

    def norm_backward(
        self, slope: Tensor, x: Tensor, weight: Tensor, inverse: Tensor
    ) -> tuple[Tensor, Tensor]:
        slopes = (torch.empty_like(x), torch.zeros_like(weight))
        width = x.shape[-1]
        tensors = _pointers(slope, x, weight, inverse, *slopes)
        self._norm_backward(*tensors, x.numel() // width, width)
        return slopes

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return silu(gate) * up."""
        out = torch.empty_like(gate)
        self._gated(*_pointers(gate, up, out), gate.numel())
        return out

    def gated_backward(self, slope: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        slopes = (torch.empty_like(gate), torch.empty_like(up))
        self._gated_backward(*_pointers(slope, gate, up, *slopes), gate.numel())
        return slopes


def _pointers(*tensors: Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _sizes(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor) -> tuple[int, int, int, int]:
    tokens, heads, width = query.shape
    kv_heads = key.shape[1]
    if key.shape != (tokens, kv_heads, width) or value.shape != key.shape or heads % kv_heads:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (query, key, value))
        raise NotImplementedError(f"attention over {shapes}")
    if bounds.dtype != torch.int64 or bounds[-1] != tokens:
        raise ValueError(f"sequences that end at {bounds.tolist()} of {tokens} tokens")
    return len(bounds) - 1, heads, kv_heads, width


@cache
def load_kernels() -> TrainingKernels | None:
    """Build the kernels, or log one line and return None where that fails."""
    return build_kernels(_SOURCES, TrainingKernels, _agrees_with_torch)


def _agrees_with_torch(kernels: TrainingKernels) -> bool:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    bounds, scale, eps = torch.tensor([0, 3, 73]), 0.3, 0.1
    query, key, value, slope = (
        draw(73, 4, 40),
        draw(73, 2, 40),
        draw(73, 2, 40),
        draw(73, 4, 40),
    )
    x, weight, gate, up, other = draw(9, 40), draw(40), draw(9, 40), draw(9, 40), draw(9, 40)
    out, lse = kernels.attend(query, key, value, bounds, scale)
    normed, inverse = kernels.norm(x, weight, eps)
    ours = (
        *(out, *kernels.attend_backward(slope, query, key, value, out, lse, bounds, scale)),
        *(normed, *kernels.norm_backward(other, x, weight, inverse)),
        *(kernels.gated(gate, up), *kernels.gated_backward(other, gate, up)),
    )
    for tensor in (inputs := (query, key, value, x, weight, gate, up)):
        tensor.requires_grad_()
    outputs = (
        attend_per_sequence(query, key, value, bounds, scale),
        functional.rms_norm(x, (40,), weight, eps),
        functional.silu(gate) * up,
    )
    slopes = torch.autograd.grad(outputs, inputs, (slope, other, other))
    theirs = (outputs[0], *slopes[:3], outputs[1], *slopes[3:5], outputs[2], *slopes[5:])
    return all(
        torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in zip(ours, theirs, strict=True)
    )


def attend_per_sequence(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float
) -> Tensor:
    """Compute the same with torch's kernel, once for each sequence."""
    sizes: list[int] = bounds.diff().tolist()
    by_heads = (tensor.transpose(0, 1)[None].split(sizes, 2) for tensor in (query, key, value))
    parts = [
        functional.scaled_dot_product_attention(
            *sequence, is_causal=True, enable_gqa=True, scale=scale
        )
        for sequence in zip(*by_heads, strict=True)
    ]
    # some models call `view` on the result
    return torch.cat(parts, 2)[0].transpose(0, 1).contiguous()
