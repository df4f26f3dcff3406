"""A layer's norms and gates in one pass each way instead of ten; what they compute stays the same.

A module is taken by its looks, whatever its model, and only if it then gives what it gave before.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tlt.learn.kernels import Kernels

_Forward = Callable[[Tensor], Tensor]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out, inverse = kernels.norm(x, weight, eps)
        ctx.kernels = kernels
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = slopes
        return None, *ctx.kernels.norm_backward(slope.contiguous(), *ctx.saved_tensors), None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.kernels = kernels
        ctx.save_for_backward(gate, up)
        return kernels.gated(gate, up)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = slopes
        return None, *ctx.kernels.gated_backward(slope.contiguous(), *ctx.saved_tensors)


def fuse(model: nn.Module, kernels: Kernels) -> None:
    for module in model.modules():
        fused = _norm(module, kernels) or _gated(module, kernels)
        if fused is not None and _same(module, fused):
            module.forward = fused


def unfuse(model: nn.Module) -> dict[nn.Module, _Forward]:
    """What was fused, for `restore`."""
    return {m: m.__dict__.pop("forward") for m in model.modules() if "forward" in m.__dict__}


def restore(fused: dict[nn.Module, _Forward]) -> None:
    for module, forward in fused.items():
        module.forward = forward


def _norm(module: nn.Module, kernels: Kernels) -> _Forward | None:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or weight is None or eps is None:
        return None
    plain = module.forward

    def forward(x: Tensor) -> Tensor:
        fits = x.dtype == weight.dtype == torch.float32
        return _Norm.apply(kernels, x, weight, eps) if fits else plain(x)  # pyright: ignore

    return forward


def _gated(module: nn.Module, kernels: Kernels) -> _Forward | None:
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    gate_proj, up_proj, down_proj = parts
    act: Any = getattr(module, "act_fn", functional.silu)
    if not all(isinstance(part, nn.Linear) for part in parts):
        return None
    assert gate_proj is not None
    assert up_proj is not None
    assert down_proj is not None

    def forward(x: Tensor) -> Tensor:
        gate, up = gate_proj(x), up_proj(x)
        fits = gate.dtype == up.dtype == torch.float32
        mixed = _Gated.apply(kernels, gate, up) if fits else act(gate) * up  # pyright: ignore
        return down_proj(mixed)

    return forward


def _same(module: nn.Module, fused: _Forward) -> bool:
    width = next(module.parameters()).shape[-1]
    x = 3 * torch.randn(4, width, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return torch.allclose(fused(x), module(x), rtol=1e-4, atol=1e-5)
