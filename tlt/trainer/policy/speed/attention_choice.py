"""Choose the fastest attention by measuring the model's own layers, once per process and shape.

The choice changes how a number is computed and not which: no attention is chosen before it gave
the states that Transformers' own gives.
"""

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import structlog
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tlt.base.human_format import one_line
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
# what models raise for rows or requests that they don't know
_REFUSALS = (RuntimeError, TypeError, ValueError)
_REGISTERED = {"packed": PACKED, "native": NATIVE, "flash": FLASH}
# relative error of a token's states in float32
_SAME = 1e-3
# in bfloat16 real weights' states are off by a tenth and more: it is the part of the error of a row
# that isn't cut into its sequences
_OF_UNCUT = 0.5
NEEDS_BFLOAT16 = "it needs algorithm.precision: bfloat16"

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
        misfit = self._misfit(name)
        if misfit is not None:
            raise refusal(model, name, misfit)
        return name

    def _fastest(self) -> AttentionKind:
        began = time.monotonic()
        candidates = self._candidates()
        refused: dict[AttentionKind, str] = {}
        for kind in candidates:
            misfit = self._misfit(kind)
            if misfit is not None:
                refused[kind] = misfit
        measured: list[AttentionKind] = ["padded", *(k for k in candidates if k not in refused)]
        seconds: dict[AttentionKind, float] = {"padded": 0.0}
        if len(measured) > 1:
            seconds = {
                kind: layer_seconds(self.model, self.spec, self.context, self.bfloat16, kind)
                for kind in measured
            }
        best = min(seconds, key=lambda kind: seconds[kind])
        if seconds[best] * _LEAST_SPEEDUP > seconds["padded"]:
            best = "padded"
        log_choice(
            best,
            refused,
            measured={kind: round(value, 5) for kind, value in seconds.items()},
            seconds=round(time.monotonic() - began, 2),
        )
        return best

    def _candidates(self) -> list[AttentionKind]:
        """Return what computes packed rows on the model's device."""
        if self.model.device.type != "cpu":
            return ["flash"]
        return ["packed", "native"] if load_kernels() is not None else ["packed"]

    def _misfit(self, kind: AttentionKind) -> str | None:
        """Say why the model's states change, or why long rows can't be computed."""
        if self.spec.attention == "auto" and not decoder_layers(self.model):
            return "Transformers names no layers to measure"
        if kind == "flash" and not self.bfloat16:
            return NEEDS_BFLOAT16
        misfit = packing_misfit(self.model, kind)
        if misfit is not None:
            return misfit
        try:
            with _attention(self.model, kind):
                self._run_long_row()
        except _REFUSALS as error:
            return one_line(error)
        return None

    def _run_long_row(self) -> None:
        """Raise if the model can't take a row that is longer than a sequence."""
        model, budget = self.model, self.spec.chosen_microbatch_tokens
        width = min(_LONG_SEQUENCE, self.context or _LONG_SEQUENCE, budget)
        # one more, because a sample's last token is no input
        lengths = [width + 1] * (budget // width)
        row = pack(make_dummy_samples(lengths, vocabulary_size(model)), model.device)
        if decoder_layers(model):
            LayerProbe(model, row.tokens, row.bounds).forward(bfloat16=False)


def refusal(model: PreTrainedModel, kind: AttentionKind, misfit: str) -> ConfigError:
    return ConfigError(
        f"algorithm.attention: {kind} does not fit {model.config.model_type}: {misfit}"
    )


def log_choice(
    chosen: AttentionKind, refused: Mapping[AttentionKind, str], **measured: object
) -> None:
    """Log it, as a warning if padding is what is left."""
    fell_back = chosen == "padded" and bool(refused)
    log = _log.warning if fell_back else _log.info
    reasons = {"refused": dict(refused)} if refused else {}
    log("attention chosen", attention=chosen, **reasons, **measured)


def packing_misfit(
    model: PreTrainedModel, kind: AttentionKind, bfloat16: bool = False
) -> str | None:
    """Say why packed sequences don't get the states that they have alone; None: they do.

    `bfloat16` says that the model computes in it.
    """
    text = model.config.get_text_config()
    if not _attends_to_all(model):
        return "its layers attend to a part of the earlier tokens"
    tokens = torch.arange(14, device=model.device)[None] % text.vocab_size
    bounds = torch.tensor([0, 5, 14], device=model.device)
    try:
        with torch.no_grad():
            alone = [last_hidden_states(model, part)[0] for part in tokens.split([5, 9], 1)]
            # small weights can hide that a layer has an attention of its own
            uncut = last_hidden_states(model, tokens)[0]
            with _attention(model, kind), record_callers(_REGISTERED[kind]) as callers:
                together = last_hidden_states(model, tokens, bounds, longest=9)[0]
    except _REFUSALS as error:
        return one_line(error)
    if len(callers) < text.num_hidden_layers:
        return f"{len(callers)} of {text.num_hidden_layers} layers use it"
    error, bound = relative_error(together, torch.cat(alone)), _SAME
    if bfloat16 or kind == "flash":
        bound = max(bound, _OF_UNCUT * relative_error(uncut, torch.cat(alone)))
    # a NaN is a misfit, too
    return None if error <= bound else f"states are {error:.1e} off, {bound:.1e} is rounding"


def relative_error(states: Tensor, exact: Tensor) -> float:
    """Return the mean error of tokens, each relative to the norm of its states.

    With real weights a single number may be a hundred times larger than most of its token's.
    """
    states, exact = states.float(), exact.float()
    # states of a padding token may all be 0
    norms = exact.norm(dim=-1).clamp_min(1e-9)
    return ((states - exact).norm(dim=-1) / norms).mean().item()


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
