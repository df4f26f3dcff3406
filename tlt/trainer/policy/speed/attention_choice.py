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

from tlt.errors import ConfigError
from tlt.kernels.training_kernels import load_kernels
from tlt.spec.config import AlgorithmSpec
from tlt.trainer.policy.model.micro_batches import build_micro_batches, pack
from tlt.trainer.policy.model.model_loading import last_hidden_states, vocabulary_size
from tlt.trainer.policy.model.packed_attention import FLASH, NATIVE, PACKED, record_callers
from tlt.trainer.policy.speed.fused_layers import fuse, unfuse
from tlt.trainer.policy.speed.layer_probe import LayerProbe, decoder_layers, make_dummy_samples

# speedup below which Transformers' own attention is kept
_LEAST_SPEEDUP = 1.05
# answers of one group differ in length about this much
_MEASURED_LENGTHS = (384, 256, 192, 128, 96, 64)
_LONG_SEQUENCE = 512
# `padded` is the attention that Transformers chooses for the model
AttentionKind = Literal["padded", "packed", "native", "flash"]
_REGISTERED = {"packed": PACKED, "native": NATIVE, "flash": FLASH}
# relative error of states in float32, and where attention is computed in bfloat16
_SAME, _SAME_IN_BFLOAT16 = 1e-3, 5e-2

_log = structlog.get_logger("trainer")
# choices of this process, by model and shape
choices: dict[str, AttentionKind] = {}


def set_attention(
    model: PreTrainedModel, spec: AlgorithmSpec, context: int | None, bfloat16: bool
) -> bool:
    """Set the model's attention, and return True if its micro-batches are packed."""
    kind = _AttentionChoice(model, spec, context, bfloat16).choose()
    apply_attention(model, kind)
    return kind != "padded"


def apply_attention(model: PreTrainedModel, kind: AttentionKind) -> None:
    if kind != "padded":
        model.set_attn_implementation(_REGISTERED[kind])
    if kind == "native" and (kernels := load_kernels()) is not None:
        fuse(model, kernels)


@contextmanager
def _attention(model: PreTrainedModel, kind: AttentionKind) -> Generator[None]:
    own = model.config._attn_implementation  # pyright: ignore[reportPrivateUsage]
    assert own is not None
    apply_attention(model, kind)
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

    def choose(self) -> AttentionKind:
        model, spec, name = self.model, self.spec, self.spec.attention
        device = model.device
        if name == "padded":
            return "padded"
        if name == "auto":
            shape = f"{self.context} {spec.chosen_microbatch_tokens} {self.bfloat16}"
            key = f"{model.config.to_json_string()} {shape}"
            if key not in choices:
                choices[key] = self._fastest()
            return choices[key]
        if name == "native" and (device.type != "cpu" or load_kernels() is None):
            raise ConfigError("algorithm.attention: native needs a CPU and a C compiler")
        if name == "flash":
            require_flash(device, self.bfloat16)
        if not self._fits(name):
            raise ConfigError(f"algorithm.attention: {name} does not fit {model.config.model_type}")
        return name

    def _fastest(self) -> AttentionKind:
        began = time.monotonic()
        fitting = self._fitting()
        seconds: dict[AttentionKind, float] = {"padded": 0.0}
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

    def _fitting(self) -> list[AttentionKind]:
        """Return what the model can be computed with on its device."""
        fitting: list[AttentionKind] = ["padded"]
        if not decoder_layers(self.model):
            return fitting
        if self.model.device.type != "cpu":
            if self.bfloat16 and self._fits("flash"):
                fitting.append("flash")
            return fitting
        if self._fits("packed"):
            fitting.append("packed")
            if load_kernels() is not None and self._fits("native"):
                fitting.append("native")
        return fitting

    def _fits(self, kind: AttentionKind) -> bool:
        """Return True if the model's states stay the same, and long rows can be computed."""
        if not packs_correctly(self.model, kind):
            return False
        try:
            with _attention(self.model, kind):
                self._run_long_row()
        except (RuntimeError, TypeError, ValueError):
            return False
        return True

    def _run_long_row(self) -> None:
        """Raise if the model can't take a row that is longer than a sequence."""
        model, budget = self.model, self.spec.chosen_microbatch_tokens
        width = min(_LONG_SEQUENCE, self.context or _LONG_SEQUENCE, budget)
        # one more, because a sample's last token is no input
        lengths = [width + 1] * (budget // width)
        row = pack(make_dummy_samples(lengths, vocabulary_size(model)), model.device)
        if decoder_layers(model):
            LayerProbe(model, row.tokens, row.bounds).forward(bfloat16=False)


def packs_correctly(model: PreTrainedModel, kind: AttentionKind, bfloat16: bool = False) -> bool:
    """Return True if packed sequences get the states that they have alone.

    `bfloat16` says that the model computes in it.
    """
    text = model.config.get_text_config()
    if not _attends_to_all(model):
        return False
    tokens = torch.arange(14, device=model.device)[None] % text.vocab_size
    bounds = torch.tensor([0, 5, 14], device=model.device)
    try:
        with torch.no_grad():
            alone = [last_hidden_states(model, part)[0] for part in tokens.split([5, 9], 1)]
            # small weights can hide that a layer has an attention of its own
            with _attention(model, kind), record_callers(_REGISTERED[kind]) as callers:
                together = last_hidden_states(model, tokens, bounds, longest=9)[0]
    except (RuntimeError, TypeError, ValueError):
        return False
    if len(callers) < text.num_hidden_layers:
        return False
    error = _SAME_IN_BFLOAT16 if bfloat16 or kind == "flash" else _SAME
    return torch.allclose(together, torch.cat(alone), rtol=error, atol=error)


def require_flash(device: torch.device, bfloat16: bool) -> None:
    if device.type != "cuda" or not bfloat16:
        raise ConfigError(
            "algorithm.attention: flash needs a GPU and algorithm.precision: bfloat16"
        )


def layer_seconds(
    model: PreTrainedModel,
    spec: AlgorithmSpec,
    context: int | None,
    bfloat16: bool,
    kind: AttentionKind,
) -> float:
    """Measure one layer's time for a step of typical lengths."""
    lengths = [min(length, context or length) for length in _MEASURED_LENGTHS]
    samples = make_dummy_samples(lengths, vocabulary_size(model))
    batches = build_micro_batches(
        samples, spec.chosen_microbatch_tokens, model.device, kind != "padded"
    )
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
