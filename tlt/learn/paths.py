"""What is fast on this machine is measured on the model's own layers, once per process and shape.

The choice changes how a number is computed and not which: no path is taken before it gave the
states that Transformers' own gives.
"""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Literal

import structlog
import torch
from transformers import PreTrainedModel

from tlt.config import AlgorithmSpec
from tlt.errors import ConfigError
from tlt.learn.attention import NATIVE, PACKED
from tlt.learn.batching import Microbatch, microbatches
from tlt.learn.fusing import fuse, unfuse
from tlt.learn.kernels import kernels
from tlt.learn.layers import Probe, decoder_layers
from tlt.learn.loading import states
from tlt.learn.sample import LearnSample

# A draw goes to the way that everybody uses.
_ADVANTAGE = 1.05
# Answers of one group differ about this much.
_LENGTHS = (384, 256, 192, 128, 96, 64)
# `padded` is what Transformers itself takes for the model.
_Kind = Literal["padded", "packed", "native"]
_REGISTERED = {"packed": PACKED, "native": NATIVE}

_log = structlog.get_logger("learn")
_chosen: dict[str, _Kind] = {}


def takes_bfloat16(spec: AlgorithmSpec, device: torch.device) -> bool:
    """Left to itself, only where there are matrix units for it.

    Without them it gains less than it costs: its log-probs aren't the sampler's, and computing the
    old ones is a pass of its own.
    """
    match spec.precision:
        case "float32":
            return False
        case "bfloat16":
            return True
        case "auto" if device.type == "cuda":
            return torch.cuda.is_bf16_supported()
        case "auto":
            amx: Callable[[], bool] = torch.cpu._is_amx_tile_supported  # pyright: ignore
            return device.type == "cpu" and amx()


def set_attention(model: PreTrainedModel, spec: AlgorithmSpec, context: int | None) -> bool:
    """Whether its micro-batches are packed."""
    kind = _kind(model, spec, context)
    _take(model, kind)
    return kind != "padded"


def _take(model: PreTrainedModel, kind: _Kind) -> None:
    if kind != "padded":
        model.set_attn_implementation(_REGISTERED[kind])
    if kind == "native" and (found := kernels()) is not None:
        fuse(model, found)


def _kind(model: PreTrainedModel, spec: AlgorithmSpec, context: int | None) -> _Kind:
    device = model.device
    if spec.attention == "padded" or (spec.attention == "auto" and device.type != "cpu"):
        return "padded"
    if spec.attention == "auto":
        key = f"{model.config.to_json_string()} {context} {takes_bfloat16(spec, device)}"
        if key not in _chosen:
            _chosen[key] = _fastest(model, spec, context)
        return _chosen[key]
    if spec.attention == "native" and (device.type != "cpu" or kernels() is None):
        raise ConfigError("algorithm.attention: native needs a CPU and a C compiler")
    if not _packs(model, spec.attention):
        raise ConfigError(
            f"algorithm.attention: {spec.attention} does not fit {model.config.model_type}"
        )
    return spec.attention


def _fastest(model: PreTrainedModel, spec: AlgorithmSpec, context: int | None) -> _Kind:
    began = time.monotonic()
    fitting: list[_Kind] = ["padded"]
    if decoder_layers(model) and _packs(model, "packed"):
        fitting.append("packed")
        if kernels() is not None and _packs(model, "native"):
            fitting.append("native")
    seconds: dict[_Kind, float] = {"padded": 0.0}
    if len(fitting) > 1:
        seconds = {kind: _seconds(model, spec, context, kind) for kind in fitting}
    best = min(seconds, key=lambda kind: seconds[kind])
    if seconds[best] * _ADVANTAGE > seconds["padded"]:
        best = "padded"
    _log.info(
        "attention chosen",
        attention=best,
        measured={kind: round(value, 5) for kind, value in seconds.items()},
        seconds=round(time.monotonic() - began, 2),
    )
    return best


def _seconds(
    model: PreTrainedModel, spec: AlgorithmSpec, context: int | None, kind: _Kind
) -> float:
    """One layer's time for a step of typical lengths."""
    bfloat16 = takes_bfloat16(spec, model.device)
    batches = _typical(spec, context, model.device, kind != "padded")
    with _attending(model, kind):
        return sum(Probe(model, batch.tokens, batch.bounds).seconds(bfloat16) for batch in batches)


@contextmanager
def _attending(model: PreTrainedModel, kind: _Kind) -> Generator[None]:
    own = model.config._attn_implementation  # pyright: ignore[reportPrivateUsage]
    assert own is not None
    _take(model, kind)
    try:
        yield
    finally:
        unfuse(model)
        model.set_attn_implementation(own)


def _typical(
    spec: AlgorithmSpec, context: int | None, device: torch.device, packed: bool
) -> list[Microbatch]:
    lengths = [length if context is None else min(length, context) for length in _LENGTHS]
    samples = [
        LearnSample(
            prompt=(0,),
            completion=(0,) * (length - 1),
            logprobs=(0.0,) * (length - 1),
            temperature=1.0,
            advantage=1.0,
        )
        for length in lengths
        if length > 1
    ]
    return microbatches(samples, spec.microbatch_tokens, device, packed)


def _packs(model: PreTrainedModel, kind: _Kind) -> bool:
    """Whether sequences in one row have the states that they have alone."""
    if not _attends_to_all(model):
        return False
    tokens = torch.arange(14, device=model.device)[None] % model.config.get_text_config().vocab_size
    bounds = torch.tensor([0, 5, 14], device=model.device)
    try:
        with torch.no_grad():
            alone = [states(model, part)[0] for part in tokens.split([5, 9], 1)]
            with _attending(model, kind):
                together = states(model, tokens, bounds)[0]
    except (NotImplementedError, TypeError, ValueError):
        return False
    return torch.allclose(together, torch.cat(alone), rtol=1e-3, atol=1e-3)


def _attends_to_all(model: PreTrainedModel) -> bool:
    """A window is wider than any test that we would wait for."""
    config = model.config.get_text_config()
    kinds: list[str] | None = getattr(config, "layer_types", None)
    if kinds is not None:
        return set(kinds) == {"full_attention"}
    limits = ("sliding_window", "attention_chunk_size")
    return not any(getattr(config, limit, None) for limit in limits)
