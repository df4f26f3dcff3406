"""A decoder layer by itself: what its model would give it, and how long it takes there and back."""

import time
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tlt.learn.loading import states


class _Kept(Exception):
    """Ends a forward pass where it has told what we wanted to know."""


def decoder_layers(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


class Probe:
    """The first layer under one micro-batch; the model has at least one."""

    def __init__(self, model: PreTrainedModel, tokens: Tensor, bounds: Tensor | None) -> None:
        self._layer, *_ = decoder_layers(model)
        self._arguments: tuple[Any, ...] = ()
        self._options: dict[str, Any] = {}

        def keep(_: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            self._arguments, self._options = arguments, options
            raise _Kept

        handle = self._layer.register_forward_pre_hook(keep, with_kwargs=True)
        try:
            with torch.no_grad():
                states(model, tokens, bounds)
        except _Kept:
            pass
        finally:
            handle.remove()

    def seconds(self, bfloat16: bool) -> float:
        """Of this thread, forward and backward: the best of three, after one to warm up."""
        hidden, *others = self._arguments
        hidden = hidden.detach().requires_grad_()
        learned = [parameter for parameter in self._layer.parameters() if parameter.requires_grad]

        def once() -> float:
            began = time.thread_time()
            with torch.autocast(hidden.device.type, torch.bfloat16, enabled=bfloat16):
                found = self._layer(hidden, *others, **self._options)
            out: Tensor = found[0] if isinstance(found, tuple) else found
            torch.autograd.grad(out.float().sum(), [hidden, *learned])
            return time.thread_time() - began

        once()
        return min(once() for _ in range(3))
