"""Call a check between any two long matrix products, in the forward pass and in the backward pass.

A check that raises gives the micro-batch up before it changed anything. Only products take long,
so large ones are cut into parts.
"""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tlt.base.interrupt_check import CheckInterrupt

# multiplications that one CPU core does in about thirty milliseconds
CPU_WORK = 2**30
# a GPU does this many times as many in that time
_GPU_FACTOR = 64
# layers with this many times less work get no check, because a hook takes time, too
_NEGLIGIBLE = 64


def work_per_check(like: Tensor) -> int:
    """Return how many multiplications may pass without a check on this tensor's device."""
    return CPU_WORK if like.device.type == "cpu" else _GPU_FACTOR * CPU_WORK


@contextmanager
def check_layers(model: nn.Module, rows: int, check: CheckInterrupt) -> Generator[None]:
    """Check after each long linear layer of the forward pass and before it in the backward pass."""

    def after_forward(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        check()
        check_backward(output, check)

    hooks = [
        module.register_forward_hook(after_forward)
        for module in model.modules()
        if isinstance(module, nn.Linear)
        and module.weight.numel() * rows * _NEGLIGIBLE > work_per_check(module.weight)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def check_backward(tensor: Tensor, check: CheckInterrupt) -> None:
    """Check as soon as the backward pass knows the tensor's gradient."""
    if tensor.requires_grad:
        tensor.register_hook(lambda gradient: check())


def matmul(a: Tensor, b: Tensor, check: CheckInterrupt) -> Tensor:
    """Multiply two matrices, with checks in between."""
    rows = max(1, work_per_check(b) // b.numel())
    if len(a) <= rows:
        check()
        return a @ b
    product = a.new_empty(len(a), b.shape[1])
    for part, out in zip(a.split(rows), product.split(rows), strict=True):
        check()
        torch.mm(part, b, out=out)
    return product
