"""What is fast on this machine is measured on the model's own layers, once per process and shape.

The choice changes how a number is computed and not which: no path is taken before it gave the
states that Transformers' own gives.
"""

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal

import structlog
import torch
from transformers import PreTrainedModel

from tlt.config import AlgorithmSpec
from tlt.errors import ConfigError
from tlt.kernels.training_kernels import load_kernels
from tlt.trainer.policy.dummy_samples import make_dummy_samples
from tlt.trainer.policy.fused_layers import fuse, unfuse
from tlt.trainer.policy.layer_probe import LayerProbe, decoder_layers
from tlt.trainer.policy.micro_batches import build_micro_batches, pack
from tlt.trainer.policy.model_loading import states, vocabulary
from tlt.trainer.policy.packed_attention import NATIVE, PACKED, watched

# A draw goes to the way that everybody uses.
_ADVANTAGE = 1.05
# Answers of one group differ about this much.
_LENGTHS = (384, 256, 192, 128, 96, 64)
_LONG = 512
# `padded` is what Transformers itself takes for the model.
_Kind = Literal["padded", "packed", "native"]
_REGISTERED = {"packed": PACKED, "native": NATIVE}

_log = structlog.get_logger("learn")
_chosen: dict[str, _Kind] = {}


def set_attention(
    model: PreTrainedModel, spec: AlgorithmSpec, context: int | None, bfloat16: bool
) -> bool:
    """Whether its micro-batches are packed."""
    kind = _kind(model, spec, context, bfloat16)
    _take(model, kind)
    return kind != "padded"


def _take(model: PreTrainedModel, kind: _Kind) -> None:
    if kind != "padded":
        model.set_attn_implementation(_REGISTERED[kind])
    if kind == "native" and (found := load_kernels()) is not None:
        fuse(model, found)


def _kind(
    model: PreTrainedModel, spec: AlgorithmSpec, context: int | None, bfloat16: bool
) -> _Kind:
    device = model.device
    if spec.attention == "padded" or (spec.attention == "auto" and device.type != "cpu"):
        return "padded"
    if spec.attention == "auto":
        key = f"{model.config.to_json_string()} {context} {spec.microbatch_tokens} {bfloat16}"
        if key not in _chosen:
            _chosen[key] = _fastest(model, spec, context, bfloat16)
        return _chosen[key]
    if spec.attention == "native" and (device.type != "cpu" or load_kernels() is None):
        raise ConfigError("algorithm.attention: native needs a CPU and a C compiler")
    if not _packs(model, spec, context, spec.attention):
        raise ConfigError(
            f"algorithm.attention: {spec.attention} does not fit {model.config.model_type}"
        )
    return spec.attention


def _fastest(
    model: PreTrainedModel, spec: AlgorithmSpec, context: int | None, bfloat16: bool
) -> _Kind:
    began = time.monotonic()
    fitting: list[_Kind] = ["padded"]
    if decoder_layers(model) and _packs(model, spec, context, "packed"):
        fitting.append("packed")
    if len(fitting) > 1 and load_kernels() is not None and _packs(model, spec, context, "native"):
        fitting.append("native")
    seconds: dict[_Kind, float] = {"padded": 0.0}
    if len(fitting) > 1:
        seconds = {kind: _seconds(model, spec, context, bfloat16, kind) for kind in fitting}
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
    model: PreTrainedModel,
    spec: AlgorithmSpec,
    context: int | None,
    bfloat16: bool,
    kind: _Kind,
) -> float:
    """One layer's time for a step of typical lengths."""
    lengths = [min(length, context or length) for length in _LENGTHS]
    samples = make_dummy_samples(lengths, vocabulary(model))
    batches = build_micro_batches(samples, spec.microbatch_tokens, model.device, kind != "padded")
    with _attending(model, kind):
        return sum(
            LayerProbe(model, batch.tokens, batch.bounds).seconds(bfloat16) for batch in batches
        )


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


def _packs(model: PreTrainedModel, spec: AlgorithmSpec, context: int | None, kind: _Kind) -> bool:
    """Whether sequences in one row have the states that they have alone, by our attention."""
    text = model.config.get_text_config()
    if not _attends_to_all(model):
        return False
    tokens = torch.arange(14, device=model.device)[None] % text.vocab_size
    bounds = torch.tensor([0, 5, 14], device=model.device)
    try:
        with torch.no_grad():
            alone = [states(model, part)[0] for part in tokens.split([5, 9], 1)]
            with _attending(model, kind):
                # Small weights can hide that a layer attends in a way of its own.
                with watched(_REGISTERED[kind]) as callers:
                    together = states(model, tokens, bounds)[0]
                if len(callers) < text.num_hidden_layers:
                    return False
                _take_a_long_row(model, spec, context)
    except (RuntimeError, TypeError, ValueError):
        return False
    return torch.allclose(together, torch.cat(alone), rtol=1e-3, atol=1e-3)


def _take_a_long_row(model: PreTrainedModel, spec: AlgorithmSpec, context: int | None) -> None:
    """Raises where a row may not be longer than a sequence."""
    width = min(_LONG, context or _LONG, spec.microbatch_tokens)
    # a sample's last token isn't fed
    lengths = [width + 1] * (spec.microbatch_tokens // width)
    row = pack(make_dummy_samples(lengths, vocabulary(model)), model.device)
    if decoder_layers(model):
        LayerProbe(model, row.tokens, row.bounds).forward(bfloat16=False)


def _attends_to_all(model: PreTrainedModel) -> bool:
    """A window is wider than any test that we would wait for."""
    config = model.config.get_text_config()
    kinds: list[str] | None = getattr(config, "layer_types", None)
    if kinds is not None:
        return set(kinds) == {"full_attention"}
    limits = ("sliding_window", "attention_chunk_size")
    return not any(getattr(config, limit, None) for limit in limits)
