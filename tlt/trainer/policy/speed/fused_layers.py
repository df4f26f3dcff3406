"""Compute a layer's norms and gates in one pass each way instead of ten, with the same results.

A module is recognised by its parts, whatever its model, and replaced only if a trial agrees.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from tlt.kernels.training_kernels import TrainingKernels

_Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class _FusedForward:
    """Replaces a module's `forward`; its type tells it from replacements by others."""

    run: _Forward

    def __call__(self, x: Tensor) -> Tensor:
        return self.run(x)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: TrainingKernels, x: Tensor, weight: Tensor, eps: float
    ) -> Tensor:
        x = x.contiguous()
        out, inverse = kernels.norm(x, weight, eps)
        ctx.kernels = kernels
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        (slope,) = slopes
        return None, *ctx.kernels.norm_backward(slope.contiguous(), *ctx.saved_tensors), None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: TrainingKernels, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.kernels = kernels
        ctx.save_for_backward(gate, up)
        return kernels.gated(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        (slope,) = slopes
        return None, *ctx.kernels.gated_backward(slope.contiguous(), *ctx.saved_tensors)


def fuse(model: nn.Module, kernels: TrainingKernels) -> None:
    for module in model.modules():
        if "forward" in module.__dict__:
            continue
        fused = _fused_norm(module, kernels) or _fused_mlp(module, kernels)
        if fused is not None and _agrees(module, fused):
            module.forward = _FusedForward(fused)


def unfuse(model: nn.Module) -> dict[nn.Module, _Forward]:
    """Undo `fuse` and return what `restore` needs."""
    fused = [m for m in model.modules() if isinstance(m.__dict__.get("forward"), _FusedForward)]
    return {module: module.__dict__.pop("forward") for module in fused}


def restore(fused: dict[nn.Module, _Forward]) -> None:
    for module, forward in fused.items():
        module.forward = forward


def _fused_norm(module: nn.Module, kernels: TrainingKernels) -> _Forward | None:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or weight is None or eps is None:
        return None
    plain = module.forward

    def forward(x: Tensor) -> Tensor:
        fits = x.dtype == weight.dtype == torch.float32
        return _Norm.apply(kernels, x, weight, eps) if fits else plain(x)  # pyright: ignore

    return forward


def _fused_mlp(module: nn.Module, kernels: TrainingKernels) -> _Forward | None:
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    gate_proj, up_proj, down_proj = parts
    act: Any = getattr(module, "act_fn", functional.silu)
    # a part may have an adapter of its own
    if not all(isinstance(part, nn.Module) for part in parts) or not _is_silu(act):
        return None
    assert gate_proj is not None
    assert up_proj is not None
    assert down_proj is not None

    def forward(x: Tensor) -> Tensor:
        gate, up = gate_proj(x), up_proj(x)
        fits = gate.dtype == up.dtype == torch.float32
        mixed = _Gate.apply(kernels, gate, up) if fits else act(gate) * up  # pyright: ignore
        return down_proj(mixed)

    return forward


def _is_silu(act: Any) -> bool:
    """Compare on a wide grid: small weights would hide a difference, as gates are linear near 0."""
    grid = torch.linspace(-8, 8, 99)
    with torch.no_grad():
        return act is not None and torch.allclose(act(grid), functional.silu(grid), atol=1e-6)


def _agrees(module: nn.Module, fused: _Forward) -> bool:
    parameter = next(module.parameters())
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(4, parameter.shape[-1], generator=generator)
    with torch.no_grad():
        before = module(x)
        scale = before.abs().max().item()
        # an output that is always zero shows nothing
        return scale > 0 and torch.allclose(fused(x), before, rtol=1e-4, atol=1e-5 * scale)
