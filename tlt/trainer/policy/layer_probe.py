"""A decoder layer by itself: what its model would give it, and how long it takes there and back."""

import time
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tlt.trainer.policy.model_loading import states


class _Kept(Exception):
    """Ends a forward pass where it has told what we wanted to know."""


def decoder_layers(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


class LayerProbe:
    """The first layer that text reaches, under one micro-batch."""

    def __init__(self, model: PreTrainedModel, tokens: Tensor, bounds: Tensor | None) -> None:
        found: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []

        def keep(layer: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            found.append((layer, arguments, options))
            raise _Kept

        handles = [
            layer.register_forward_pre_hook(keep, with_kwargs=True)
            for layer in decoder_layers(model)
        ]
        try:
            with torch.no_grad():
                states(model, tokens, bounds)
        except _Kept:
            pass
        finally:
            for handle in handles:
                handle.remove()
        if not found:
            raise NotImplementedError("text reaches none of the model's layers")
        ((self._layer, (hidden, *others), self._options),) = found
        self._hidden: Tensor = hidden
        self._others: list[Any] = others

    def forward(self, bfloat16: bool) -> Tensor:
        with torch.no_grad():
            return self._out(self._hidden, bfloat16)

    def seconds(self, bfloat16: bool) -> float:
        """Forward and backward: the best of three, after one to warm up."""
        hidden = self._hidden.detach().requires_grad_()
        learned = [parameter for parameter in self._layer.parameters() if parameter.requires_grad]

        def once() -> float:
            began = _clock(hidden.device)
            out = self._out(hidden, bfloat16)
            torch.autograd.grad(out.float().sum(), [hidden, *learned])
            return _clock(hidden.device) - began

        once()
        return min(once() for _ in range(3))

    def _out(self, hidden: Tensor, bfloat16: bool) -> Tensor:
        with torch.autocast(hidden.device.type, torch.bfloat16, enabled=bfloat16):
            found = self._layer(hidden, *self._others, **self._options)
        return found[0] if isinstance(found, tuple) else found


def _clock(device: torch.device) -> float:
    """On a CPU the time of this thread alone, because others may share its core."""
    if device.type == "cpu":
        return time.thread_time()
    torch.accelerator.synchronize()
    return time.perf_counter()
