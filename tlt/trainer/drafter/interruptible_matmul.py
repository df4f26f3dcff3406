"""Between two products of matrices somebody may look, there and on the way back, and say stop.

A look that raises ends a micro-batch that then was never begun. Nothing but products takes long, so
that none is larger than it must be.
"""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tlt.interrupt import CheckInterrupt

# Multiplications that one CPU core does in some thirty milliseconds.
STRETCH = 2**30
# A GPU does as many times more.
_FASTER = 64
# A layer's product that is so many times shorter needs none of its own: hooks take time, too.
_SHORT = 64


def stretch(like: Tensor) -> int:
    """Multiplications without a look."""
    return STRETCH if like.device.type == "cpu" else _FASTER * STRETCH


@contextmanager
def watched(model: nn.Module, rows: int, check: CheckInterrupt) -> Generator[None]:
    """Long products with the model's weights are followed by a look, on the way back preceded."""

    def seen(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        check()
        look_back(output, check)

    hooks = [
        module.register_forward_hook(seen)
        for module in model.modules()
        if isinstance(module, nn.Linear)
        and module.weight.numel() * rows * _SHORT > stretch(module.weight)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def look_back(tensor: Tensor, check: CheckInterrupt) -> None:
    """When its gradient is known."""
    if tensor.requires_grad:
        tensor.register_hook(lambda slope: check())


def product(left: Tensor, right: Tensor, check: CheckInterrupt) -> Tensor:
    """Of two matrices."""
    rows = max(1, stretch(right) // right.numel())
    if len(left) <= rows:
        check()
        return left @ right
    found = left.new_empty(len(left), right.shape[1])
    for part, out in zip(left.split(rows), found.split(rows), strict=True):
        check()
        torch.mm(part, right, out=out)
    return found
