"""A model that loads publishes weights under its folder's names, and its logits are plain."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tlt.errors import ConfigError, UnsupportedModel
from tlt.trainer.policy.model.packed_attention import FLASH

# with None, Transformers would ask on a terminal
_TRUST: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def load_model(
    model_dir: str, device: torch.device, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Load without dropout, so that two passes give the same log-probs."""
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(model_dir, **_TRUST)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model_dir,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            **_TRUST,
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        first, *_ = str(error).splitlines() or [""]
        raise UnsupportedModel(f"{model_dir}: not a causal language model: {first}") from error
    # nn.Module's, because Transformers' own `to` is typed as taking no device
    nn.Module.to(model, device).eval()
    _require_names(model, Path(model_dir))
    require_plain_logits(model, model_dir)
    return model


def outline_model(model_dir: str, dtype: torch.dtype) -> PreTrainedModel:
    """Build a model without weights, to be filled by whoever knows which part of them it needs."""
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(model_dir, **_TRUST)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        first, *_ = str(error).splitlines() or [""]
        raise UnsupportedModel(f"{model_dir}: not a causal language model: {first}") from error
    model.eval()
    _require_names(model, Path(model_dir))
    return model


def output_head(model: PreTrainedModel) -> nn.Module:
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Module)
    return head


def last_hidden_states(
    model: PreTrainedModel,
    tokens: Tensor,
    bounds: Tensor | None = None,
    longest: int | None = None,
) -> Tensor:
    """Return states after the final norm; `bounds` cuts one row into sequences.

    `longest` is the length of the longest sequence, if the host knows it.
    """
    packed: dict[str, Any] = {}
    if bounds is not None:
        # with the size, the host doesn't ask the device for it
        width = tokens.shape[1]
        starts = bounds[:-1].repeat_interleave(bounds.diff(), output_size=width)
        positions = torch.arange(width, device=tokens.device) - starts
        packed = {"position_ids": positions[None], "cu_seq_lens_q": bounds}
        # another number each time would compile the layers anew
        if model.config._attn_implementation == FLASH:  # pyright: ignore[reportPrivateUsage]
            packed["max_length_q"] = longest
    return model.base_model(input_ids=tokens, use_cache=False, **packed).last_hidden_state


def context_limit(model: PreTrainedModel, max_context: int | None) -> int | None:
    positions: int | None = getattr(model.config, "max_position_embeddings", None)
    candidates = [limit for limit in (positions, max_context) if limit is not None]
    limit = min(candidates, default=None)
    steady = _steady_rope_length(model)
    if steady is not None and (limit is None or limit > steady):
        raise UnsupportedModel(
            f"{model.name_or_path}: beyond {steady} tokens its rope changes for all samples of a "
            f"micro-batch; set policy.max_context to {steady} or less"
        )
    return limit


def _steady_rope_length(model: PreTrainedModel) -> int | None:
    """Return up to which length a token's rope depends on its position alone; None: always."""
    config = model.config.get_text_config()
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    nested = [part for part in parameters.values() if isinstance(part, dict)]
    limits: list[int] = [
        rope.get("original_max_position_embeddings") or config.max_position_embeddings
        for rope in (parameters, *nested)
        if rope.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(limits, default=None)


def _require_names(model: PreTrainedModel, folder: Path) -> None:
    stored: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            stored.update(tensors.keys())
    renamed = [name for name, _ in model.named_parameters() if name not in stored]
    if renamed:
        raise UnsupportedModel(
            f"{folder}: Transformers renames its tensors when it loads them ({renamed[0]} is not "
            "in a safetensors file), so what we publish would not fit the folder"
        )


def require_plain_logits(model: PreTrainedModel, model_dir: str) -> None:
    """Refuse scaled or soft-capped logits, because training bypasses the model's own head."""
    with torch.no_grad():
        tokens = torch.arange(8, device=model.device)[None] % vocabulary_size(model)
        expected: Tensor = model(input_ids=tokens, use_cache=False).logits
        head, states = output_head(model), last_hidden_states(model, tokens)
        plain = functional.linear(states, head.get_parameter("weight"), getattr(head, "bias", None))
    if not torch.allclose(expected, plain, rtol=1e-3, atol=1e-3):
        raise UnsupportedModel(f"{model_dir}: its logits are more than a projection of its states")


def vocabulary_size(model: PreTrainedModel) -> int:
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    return embedding.num_embeddings


def require_valid_tokens(model: PreTrainedModel, limit: int | None, tokens: Sequence[int]) -> None:
    """Raise before anything is computed: on an accelerator a wrong index ends the process."""
    if limit is not None and len(tokens) > limit:
        raise ConfigError(f"a sample of {len(tokens)} tokens exceeds the context of {limit}")
    if max(tokens) >= vocabulary_size(model) or min(tokens) < 0:
        raise ConfigError(f"a sample has tokens beyond the vocabulary of {vocabulary_size(model)}")
