"""Run one decoder layer alone, on dummy samples as its model gives them, and measure its time."""

import random
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tlt.trainer.policy.model.micro_batches import PolicySample
from tlt.trainer.policy.model.model_loading import last_hidden_states


def make_dummy_samples(lengths: Iterable[int], vocabulary: int) -> list[PolicySample]:
    """Reward half of them, so that gradients nearly cancel and rounding errors show."""
    rng = random.Random(0)
    return [
        PolicySample(
            prompt=(0,),
            completion=[rng.randrange(vocabulary) for _ in range(length - 1)],
            logprobs=(0.0,) * (length - 1),
            temperature=1.0,
            advantage=1.0 if index % 2 else -1.0,
        )
        for index, length in enumerate(lengths)
        if length > 1
    ]


class _InputCaptured(Exception):
    """Ends a forward pass as soon as a layer's input is known."""


def decoder_layers(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


class LayerProbe:
    """The first layer that text reaches, with one micro-batch as its input."""

    def __init__(self, model: PreTrainedModel, tokens: Tensor, bounds: Tensor | None) -> None:
        calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []

        def capture(layer: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            calls.append((layer, arguments, options))
            raise _InputCaptured

        handles = [
            layer.register_forward_pre_hook(capture, with_kwargs=True)
            for layer in decoder_layers(model)
        ]
        try:
            with torch.no_grad():
                last_hidden_states(model, tokens, bounds)
        except _InputCaptured:
            pass
        finally:
            for handle in handles:
                handle.remove()
        if not calls:
            raise NotImplementedError("text reaches none of the model's layers")
        ((self._layer, (hidden, *others), self._options),) = calls
        self._hidden: Tensor = hidden
        self._others: list[Any] = others

    def forward(self, bfloat16: bool) -> Tensor:
        with torch.no_grad():
            return self._run(self._hidden, bfloat16)

    def seconds(self, bfloat16: bool) -> float:
        """Return the best time of three for forward and backward, after a run to warm up."""
        hidden = self._hidden.detach().requires_grad_()
        learned = [parameter for parameter in self._layer.parameters() if parameter.requires_grad]

        def measure() -> float:
            began = device_clock(hidden.device)
            out = self._run(hidden, bfloat16)
            torch.autograd.grad(out.float().sum(), [hidden, *learned])
            return device_clock(hidden.device) - began

        measure()
        return min(measure() for _ in range(3))

    def _run(self, hidden: Tensor, bfloat16: bool) -> Tensor:
        with torch.autocast(hidden.device.type, torch.bfloat16, enabled=bfloat16):
            out = self._layer(hidden, *self._others, **self._options)
        return out[0] if isinstance(out, tuple) else out


def device_clock(device: torch.device) -> float:
    """Read this thread's CPU time, because others may share its core, or an accelerator's time."""
    if device.type == "cpu":
        return time.thread_time()
    torch.accelerator.synchronize()
    return time.perf_counter()
