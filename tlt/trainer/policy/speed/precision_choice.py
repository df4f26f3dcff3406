"""Choose bfloat16 where the spec says so, or where it is faster and its gradient agrees.

Only matrix products are in bfloat16; weights, logits and the optimiser are float32 either way.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import structlog
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tlt.spec.config import AlgorithmSpec
from tlt.trainer.policy.model.logprobs import score_batch
from tlt.trainer.policy.model.micro_batches import MicroBatch, pad
from tlt.trainer.policy.model.model_loading import last_hidden_states, output_head, vocabulary_size
from tlt.trainer.policy.speed.layer_probe import LayerProbe, decoder_layers, make_dummy_samples
from tlt.trainer.tensor_cores import tensor_cores

# least cosine with the gradient in float32
_LEAST_COSINE = 0.999
_MEASURED_LENGTHS = (64, 48, 32, 32)

_log = structlog.get_logger("trainer")


def choose_bfloat16(model: PreTrainedModel, spec: AlgorithmSpec, context: int | None) -> bool:
    match spec.precision:
        case "float32":
            return False
        case "bfloat16":
            return True
        case "auto":
            with tensor_cores(model.device):
                return device_has_bfloat16(model.device) and _is_better(model, context)


def device_has_bfloat16(device: torch.device) -> bool:
    """Return True if the device has units for bfloat16; otherwise a measurement can't pay."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    amx = cast("Callable[[], bool]", torch.cpu._is_amx_tile_supported)  # pyright: ignore
    return device.type == "cpu" and amx()


def _is_better(model: PreTrainedModel, context: int | None) -> bool:
    began = time.monotonic()
    if not decoder_layers(model):
        return False
    lengths = [min(length, context or length) for length in _MEASURED_LENGTHS]
    samples = make_dummy_samples(lengths, vocabulary_size(model))
    batch = _with_targets_of(model, pad(samples, model.device))
    probe = LayerProbe(model, batch.tokens, batch.bounds)
    float32, bfloat16 = probe.seconds(bfloat16=False), probe.seconds(bfloat16=True)
    cosine = gradient_cosine(model, batch) if bfloat16 < float32 else None
    better = cosine is not None and cosine >= _LEAST_COSINE
    _log.info(
        "precision chosen",
        precision="bfloat16" if better else "float32",
        milliseconds=(round(1000 * float32, 2), round(1000 * bfloat16, 2)),
        cosine=cosine,
        seconds=round(time.monotonic() - began, 2),
    )
    return better


def _with_targets_of(model: PreTrainedModel, batch: MicroBatch) -> MicroBatch:
    """Replace the targets by tokens that the model itself would draw.

    Their gradients nearly cancel, as in a step, so that rounding errors show.
    """
    generator = torch.Generator(model.device).manual_seed(0)
    with torch.no_grad():
        states = last_hidden_states(model, batch.tokens).flatten(0, 1)[batch.positions]
        distribution = output_head(model)(states).softmax(-1)
    targets = torch.multinomial(distribution, 1, generator=generator)[:, 0]
    return replace(batch, targets=targets)


def gradient_cosine(model: PreTrainedModel, batch: MicroBatch) -> float:
    """Return the cosine between both precisions' gradients, or NaN where one isn't finite.

    Only one gradient is kept: the other's parts are compared and dropped as they are computed.
    """
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradient = batch_gradient(model, batch)
    exact: dict[Tensor, Tensor] = dict(zip(learned, gradient, strict=True))
    # both squared norms, and the product
    sums = torch.zeros(3, dtype=torch.float64, device=model.device)
    sums[0] += sum(_product(part, part) for part in exact.values())

    def compare(parameter: Tensor) -> None:
        part, parameter.grad = parameter.grad, None
        assert part is not None
        sums[1] += _product(part, part)
        sums[2] += _product(exact[parameter], part)

    handles = [parameter.register_post_accumulate_grad_hook(compare) for parameter in learned]
    try:
        _batch_loss(model, batch, bfloat16=True).backward()
    finally:
        for handle in handles:
            handle.remove()
    exact_norm, rough_norm, dot = sums.tolist()
    norms = exact_norm * rough_norm
    return dot / norms**0.5 if norms > 0 else 0.0


def _product(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dtype=torch.float64)


def batch_gradient(model: PreTrainedModel, batch: MicroBatch) -> list[Tensor]:
    """Return the gradient in float32 by parameter."""
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loss = _batch_loss(model, batch, bfloat16=False)
    return list(torch.autograd.grad(loss, learned, materialize_grads=True))


def _batch_loss(model: PreTrainedModel, batch: MicroBatch, bfloat16: bool) -> Tensor:
    logprobs, _ = score_batch(model, batch, bfloat16)
    return (logprobs * batch.advantage).sum()
