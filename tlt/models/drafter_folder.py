"""Read and write drafter folders that SGLang loads: config.json and model.safetensors."""

import json
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tlt.errors import ConfigError, UnsupportedModel
from tlt.models.config_json import read_json
from tlt.models.eagle_drafter import Drafter, DrafterConfig, new_drafter
from tlt.models.rope import PlainRope
from tlt.models.safetensors_io import write_weights

_ARCHITECTURES = {"eagle": "LlamaForCausalLMEagle", "eagle3": "LlamaForCausalLMEagle3"}
# the inverse of d2t; other trainers store it, TLT doesn't use it
_UNUSED = {"t2d"}
# of an EAGLE drafter that uses rows of the policy's head: their tokens, as SGLang reads them
TOKEN_MAP = "hot_tokens.pt"


class _EagleConfig(msgspec.Struct):
    eagle_aux_hidden_state_layer_ids: list[int] | None = None


class _RopeParameters(msgspec.Struct):
    rope_theta: float = 10_000.0
    rope_type: str = "default"


class _ConfigFile(msgspec.Struct):
    architectures: list[str]
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    vocab_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    num_hidden_layers: int = 1
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: _RopeParameters | None = None
    draft_vocab_size: int | None = None
    eagle_config: _EagleConfig | None = None
    # TLT's own keys: updates of its training, and rows of the policy's head that it uses
    tlt_updates: int | None = None
    tlt_hot_tokens: int | None = None


def save_drafter(
    drafter: Drafter,
    folder: Path,
    updates: int | None = None,
    policy_head: Tensor | None = None,
) -> None:
    """Write a folder; a stock SGLang needs rows of the `policy_head` if EAGLE-3 uses some of them.

    EAGLE's are named by a file that SGLang is given as its token map.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights, tokens = drafter.state_dict(), drafter.tokens
    if drafter.config.hot_tokens is not None and tokens is not None:
        if drafter.config.layout == "eagle":
            torch.save(tokens.tolist(), folder / TOKEN_MAP)
        elif policy_head is not None:
            weights["lm_head.weight"] = drafter.head(policy_head)
    write_weights(folder / "model.safetensors", weights)
    file = _config_file(drafter.config)
    if updates is not None:
        file["tlt_updates"] = updates
    (folder / "config.json").write_text(json.dumps(file, indent=2) + "\n")


def read_update_count(folder: Path) -> int | None:
    """Return the updates of its training, or None if TLT didn't train it."""
    return read_json(folder / "config.json", _ConfigFile).tlt_updates


def load_drafter(folder: Path, policy_layers: int) -> Drafter:
    """Load a drafter; `policy_layers` decides which layers it reads by default."""
    drafter = new_drafter(read_drafter_config(folder, policy_layers))
    expected = drafter.state_dict()
    try:
        weights = load_file(folder / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{folder}: model.safetensors cannot be read: {error}") from error
    if missing := expected.keys() - weights.keys():
        raise UnsupportedModel(f"{folder}: the drafter lacks {min(missing)}")
    unused = _UNUSED if drafter.config.hot_tokens is None else _UNUSED | {"lm_head.weight"}
    if unknown := weights.keys() - expected.keys() - unused:
        raise UnsupportedModel(f"{folder}: the drafter has {min(unknown)}, which we don't run")
    for name, tensor in expected.items():
        if weights[name].shape != tensor.shape:
            raise UnsupportedModel(
                f"{folder}: the drafter's {name} is {list(weights[name].shape)}, "
                f"config.json implies {list(tensor.shape)}"
            )
    drafter.load_state_dict({name: weights[name] for name in expected})
    return drafter


def weight_names(folder: Path, policy_layers: int) -> set[str]:
    """Return the names of the drafter's own weights; its file may hold others."""
    return set(new_drafter(read_drafter_config(folder, policy_layers)).state_dict())


def read_drafter_config(folder: Path, policy_layers: int) -> DrafterConfig:
    file = read_json(folder / "config.json", _ConfigFile)
    layouts = [kind for kind, name in _ARCHITECTURES.items() if file.architectures == [name]]
    if not layouts or file.num_hidden_layers != 1:
        raise UnsupportedModel(
            f"{folder}: {file.architectures} with {file.num_hidden_layers} layers; "
            f"we run drafters of one layer, {' or '.join(_ARCHITECTURES.values())}"
        )
    heads = file.num_attention_heads
    if min(heads, file.num_key_value_heads or heads, file.head_dim or 1) < 1:
        raise UnsupportedModel(f"{folder}: a drafter without attention heads")
    scaling = file.rope_scaling or {}
    if scaling.get("rope_type", scaling.get("type", "default")) != "default":
        raise UnsupportedModel(f"{folder}: the drafter's rope is scaled, which we don't run")
    # an EAGLE-3 drafter that uses rows of the policy's head has a copy for a stock SGLang
    has_own_head = layouts == ["eagle3"] and file.tlt_hot_tokens is None
    return DrafterConfig(
        layout="eagle" if layouts == ["eagle"] else "eagle3",
        hidden=file.hidden_size,
        intermediate=file.intermediate_size,
        heads=heads,
        kv_heads=file.num_key_value_heads or heads,
        head_dim=file.head_dim or file.hidden_size // heads,
        norm_eps=file.rms_norm_eps,
        rope=PlainRope(theta=_rope_theta(folder, file)),
        max_positions=file.max_position_embeddings,
        vocabulary=file.vocab_size,
        captured=_captured_layers(file, policy_layers)
        if layouts == ["eagle3"]
        else (policy_layers,),
        own_head=file.draft_vocab_size if has_own_head else None,
        hot_tokens=file.tlt_hot_tokens,
    )


def _captured_layers(file: _ConfigFile, policy_layers: int) -> tuple[int, ...]:
    listed = file.eagle_config.eagle_aux_hidden_state_layer_ids if file.eagle_config else None
    return (
        tuple(layer + 1 for layer in listed) if listed else default_captured_layers(policy_layers)
    )


def _rope_theta(folder: Path, file: _ConfigFile) -> float:
    """Read theta from where version 5 of Transformers writes it, or version 4."""
    parameters = file.rope_parameters
    if parameters is None:
        return 10_000.0 if file.rope_theta is None else file.rope_theta
    if parameters.rope_type != "default":
        raise UnsupportedModel(f"{folder}: the drafter's rope is scaled, which we don't run")
    return parameters.rope_theta


def default_captured_layers(policy_layers: int) -> tuple[int, ...]:
    """Return a low, a middle and a high layer, whose inputs EAGLE-3 drafters read.

    A policy of three layers has two besides the first, whose input depends on one token only.
    """
    if policy_layers < 3:
        raise UnsupportedModel(
            f"EAGLE-3 needs a policy of three layers, this one has {policy_layers}; "
            "train with layout: eagle"
        )
    if policy_layers < 6:
        return tuple(sorted({1, policy_layers // 2, policy_layers - 1}))
    return (2, policy_layers // 2, policy_layers - 3)


def _config_file(config: DrafterConfig) -> dict[str, Any]:
    assert isinstance(config.rope, PlainRope)
    file: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[config.layout]],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocabulary,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        # otherwise SGLang would use the drafter's own embedding as its head
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    if config.layout == "eagle3":
        file["draft_vocab_size"] = config.listed_tokens
        file["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in config.captured]
        }
    if config.hot_tokens is not None:
        file["tlt_hot_tokens"] = config.hot_tokens
    return file
