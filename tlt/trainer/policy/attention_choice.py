"""Choose the fastest attention by measuring the model's own layers, once per process and shape.

The choice changes how a number is computed and not which: no attention is chosen before it gave
the states that Transformers' own gives.
"""

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import structlog
import torch
from transformers import PreTrainedModel

from tlt.config import AlgorithmSpec
from tlt.errors import ConfigError
from tlt.kernels.training_kernels import load_kernels
from tlt.trainer.policy.fused_layers import fuse, unfuse
from tlt.trainer.policy.layer_probe import LayerProbe, decoder_layers
from tlt.trainer.policy.micro_batches import build_micro_batches, pack
from tlt.trainer.policy.model_loading import last_hidden_states, vocabulary_size
from tlt.trainer.policy.packed_attention import NATIVE, PACKED, record_callers
from tlt.trainer.policy.timing_dummy_samples import make_dummy_samples

# speedup below which Transformers' own attention is kept
_LEAST_SPEEDUP = 1.05
# answers of one group differ in length about this much
_MEASURED_LENGTHS = (384, 256, 192, 128, 96, 64)
_LONG_SEQUENCE = 512
# `padded` is the attention that Transformers chooses for the model
_Kind = Literal["padded", "packed", "native"]
_REGISTERED = {"packed": PACKED, "native": NATIVE}

_log = structlog.get_logger("trainer")
# choices of this process, by model and shape
choices: dict[str, _Kind] = {}


def set_attention(
    model: PreTrainedModel, spec: AlgorithmSpec, context: int | None, bfloat16: bool
) -> bool:
    """Set the model's attention, and return True if its micro-batches are packed."""
    kind = _AttentionChoice(model, spec, context, bfloat16).choose()
    _apply(model, kind)
    return kind != "padded"


def _apply(model: PreTrainedModel, kind: _Kind) -> None:
    if kind != "padded":
        model.set_attn_implementation(_REGISTERED[kind])
    if kind == "native" and (kernels := load_kernels()) is not None:
        fuse(model, kernels)


@contextmanager
def _attention(model: PreTrainedModel, kind: _Kind) -> Generator[None]:
    own = model.config._attn_implementation  # pyright: ignore[reportPrivateUsage]
    assert own is not None
    _apply(model, kind)
    try:
        yield
    finally:
        unfuse(model)
        model.set_attn_implementation(own)


@dataclass(frozen=True, eq=False)
class _AttentionChoice:
    model: PreTrainedModel
    spec: AlgorithmSpec
    context: int | None
    bfloat16: bool

    def choose(self) -> _Kind:
        model, spec, name = self.model, self.spec, self.spec.attention
        device = model.device
        if name == "padded" or (name == "auto" and device.type != "cpu"):
            return "padded"
        if name == "auto":
            shape = f"{self.context} {spec.microbatch_tokens} {self.bfloat16}"
            key = f"{model.config.to_json_string()} {shape}"
            if key not in choices:
                choices[key] = self._fastest()
            return choices[key]
        if name == "native" and (device.type != "cpu" or load_kernels() is None):
            raise ConfigError("algorithm.attention: native needs a CPU and a C compiler")
        if not self._fits(name):
            raise ConfigError(f"algorithm.attention: {name} does not fit {model.config.model_type}")
        return name

    def _fastest(self) -> _Kind:
        began = time.monotonic()
        fitting: list[_Kind] = ["padded"]
        if decoder_layers(self.model) and self._fits("packed"):
            fitting.append("packed")
        if len(fitting) > 1 and load_kernels() is not None and self._fits("native"):
            fitting.append("native")
        seconds: dict[_Kind, float] = {"padded": 0.0}
        if len(fitting) > 1:
            seconds = {
                kind: layer_seconds(self.model, self.spec, self.context, self.bfloat16, kind)
                for kind in fitting
            }
        best = min(seconds, key=lambda kind: seconds[kind])
        if seconds[best] * _LEAST_SPEEDUP > seconds["padded"]:
            best = "padded"
        _log.info(
            "attention chosen",
            attention=best,
            measured={kind: round(value, 5) for kind, value in seconds.items()},
            seconds=round(time.monotonic() - began, 2),
        )
        return best

    def _fits(self, kind: _Kind) -> bool:
        """Return True if packed sequences get the states that they have alone."""
        model = self.model
        text = model.config.get_text_config()
        if not _attends_to_all(model):
            return False
        tokens = torch.arange(14, device=model.device)[None] % text.vocab_size
        bounds = torch.tensor([0, 5, 14], device=model.device)
        try:
            with torch.no_grad():
                alone = [last_hidden_states(model, part)[0] for part in tokens.split([5, 9], 1)]
                with _attention(model, kind):
                    # small weights can hide that a layer has an attention of its own
                    with record_callers(_REGISTERED[kind]) as callers:
                        together = last_hidden_states(model, tokens, bounds)[0]
                    if len(callers) < text.num_hidden_layers:
                        return False
                    self._run_long_row()
        except (RuntimeError, TypeError, ValueError):
            return False
        return torch.allclose(together, torch.cat(alone), rtol=1e-3, atol=1e-3)

    def _run_long_row(self) -> None:
        """Raise if the model can't take a row that is longer than a sequence."""
        model, budget = self.model, self.spec.microbatch_tokens
        width = min(_LONG_SEQUENCE, self.context or _LONG_SEQUENCE, budget)
        # one more, because a sample's last token is no input
        lengths = [width + 1] * (budget // width)
        row = pack(make_dummy_samples(lengths, vocabulary_size(model)), model.device)
        if decoder_layers(model):
            LayerProbe(model, row.tokens, row.bounds).forward(bfloat16=False)


def layer_seconds(
    model: PreTrainedModel,
    spec: AlgorithmSpec,
    context: int | None,
    bfloat16: bool,
    kind: _Kind,
) -> float:
    """Measure one layer's time for a step of typical lengths."""
    lengths = [min(length, context or length) for length in _MEASURED_LENGTHS]
    samples = make_dummy_samples(lengths, vocabulary_size(model))
    batches = build_micro_batches(samples, spec.microbatch_tokens, model.device, kind != "padded")
    with _attention(model, kind):
        return sum(
            LayerProbe(model, batch.tokens, batch.bounds).seconds(bfloat16) for batch in batches
        )


def _attends_to_all(model: PreTrainedModel) -> bool:
    """Read the config, because a window is wider than any trial of reasonable length."""
    config = model.config.get_text_config()
    kinds: list[str] | None = getattr(config, "layer_types", None)
    if kinds is not None:
        return set(kinds) == {"full_attention"}
    limits = ("sliding_window", "attention_chunk_size")
    return not any(getattr(config, limit, None) for limit in limits)
