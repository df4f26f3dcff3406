"""bfloat16 is taken by a word, or where it was measured to be faster and to point the same way.

It is the products that are in bfloat16; weights, logits and the optimiser are float32 either way.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import structlog
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tlt.config import AlgorithmSpec
from tlt.trainer.policy.dummy_samples import make_dummy_samples
from tlt.trainer.policy.layer_probe import LayerProbe, decoder_layers
from tlt.trainer.policy.logprobs import score_batch
from tlt.trainer.policy.micro_batches import MicroBatch, pad
from tlt.trainer.policy.model_loading import head, states, vocabulary

# with float32's gradient
_COSINE = 0.999
_LENGTHS = (64, 48, 32, 32)

_log = structlog.get_logger("learn")


def choose_bfloat16(model: PreTrainedModel, spec: AlgorithmSpec, context: int | None) -> bool:
    match spec.precision:
        case "float32":
            return False
        case "bfloat16":
            return True
        case "auto":
            return _has_units(model.device) and _pays(model, context)


def _has_units(device: torch.device) -> bool:
    """Without them there is nothing to gain that is worth a measurement."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    amx = cast("Callable[[], bool]", torch.cpu._is_amx_tile_supported)  # pyright: ignore
    return device.type == "cpu" and amx()


def _pays(model: PreTrainedModel, context: int | None) -> bool:
    began = time.monotonic()
    if not decoder_layers(model):
        return False
    lengths = [min(length, context or length) for length in _LENGTHS]
    samples = make_dummy_samples(lengths, vocabulary(model))
    batch = _own(model, pad(samples, model.device))
    probe = LayerProbe(model, batch.tokens, batch.bounds)
    float32, bfloat16 = probe.seconds(bfloat16=False), probe.seconds(bfloat16=True)
    cosine = gradient_cosine(model, batch) if bfloat16 < float32 else None
    pays = cosine is not None and cosine >= _COSINE
    _log.info(
        "precision chosen",
        precision="bfloat16" if pays else "float32",
        milliseconds=(round(1000 * float32, 2), round(1000 * bfloat16, 2)),
        cosine=cosine,
        seconds=round(time.monotonic() - began, 2),
    )
    return pays


def _own(model: PreTrainedModel, batch: MicroBatch) -> MicroBatch:
    """Targets that the model itself would draw.

    Their slopes nearly cancel, as in a step, and rounding shows: other targets would hide most
    of it.
    """
    dice = torch.Generator(model.device).manual_seed(0)
    with torch.no_grad():
        chosen = states(model, batch.tokens).flatten(0, 1)[batch.positions]
        distribution = head(model)(chosen).softmax(-1)
    targets = torch.multinomial(distribution, 1, generator=dice)[:, 0]
    return replace(batch, targets=targets)


def gradient_cosine(model: PreTrainedModel, batch: MicroBatch) -> float:
    """Between the gradients in both precisions. Not above the bar where one isn't finite."""
    exact, rough = (_gradient(model, batch, bfloat16) for bfloat16 in (False, True))
    pairs = list(zip(exact, rough, strict=True))

    def dot(which: Callable[[Tensor, Tensor], Tensor]) -> float:
        return sum(which(a.double(), b.double()).item() for a, b in pairs)

    product = dot(lambda a, b: (a * b).sum())
    norms = dot(lambda a, _: a.square().sum()) * dot(lambda _, b: b.square().sum())
    return product / norms**0.5 if norms > 0 else 0.0


def _gradient(model: PreTrainedModel, batch: MicroBatch, bfloat16: bool) -> list[Tensor]:
    logprobs, _ = score_batch(model, batch, bfloat16)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loss = (logprobs * batch.advantage).sum()
    return list(torch.autograd.grad(loss, learned, materialize_grads=True))
