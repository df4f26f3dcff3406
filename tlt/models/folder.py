"""A model folder is either read whole and exactly as Transformers would compute it, or refused.

A refusal is one line: the folder, what was found there, what we run.
"""

from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from tlt.errors import ConfigError, UnsupportedModel
from tlt.models.llama import Llama, LlamaConfig, mismatch, weight_shapes

_T = TypeVar("_T")

_FAMILY = "LlamaForCausalLM"
_FORMATS = {"F64", "F32", "F16", "BF16"}
# A buffer that old checkpoints carry along; it follows from rope_theta.
_DERIVED = "rotary_emb.inv_freq"


class _Rope(msgspec.Struct):
    rope_theta: float | None = None
    rope_type: str | None = None
    type: str | None = None
    partial_rotary_factor: float | None = None


class _ConfigFile(msgspec.Struct):
    """config.json, with Transformers' defaults; rope as version 5 writes it and as 4 did."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    architectures: list[str] | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float | None = None
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    partial_rotary_factor: float | None = None
    quantization_config: dict[str, object] | None = None


class _Family(msgspec.Struct):
    architectures: list[str] | None = None


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def load_llama(folder: Path, dtype: torch.dtype = torch.float32) -> Llama:
    config = read_config(folder)
    weights: dict[str, torch.Tensor] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    wanted = weight_shapes(config)
    for file in _weight_files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    if name.endswith(_DERIVED):
                        continue
                    stored = tensors.get_slice(name)
                    shapes[name] = tuple(stored.get_shape())
                    if stored.get_dtype() not in _FORMATS:
                        raise _unsupported(folder, f"{name} is stored as {stored.get_dtype()}")
                    if name in wanted:
                        weights[name] = tensors.get_tensor(name).to(dtype)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file}: cannot be read as safetensors: {error}") from error
    if (complaint := mismatch(config, shapes)) is not None:
        raise _unsupported(folder, complaint)
    return Llama(config=config, weights=weights)


def read_config(folder: Path) -> LlamaConfig:
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such model folder")
    raw = _read(folder / "config.json")
    # The family first: another one's config.json may lack what a Llama's must have.
    family = _decode(folder / "config.json", raw, _Family).architectures
    if family != [_FAMILY]:
        raise _unsupported(folder, f"architectures is {family}")
    file = _decode(folder / "config.json", raw, _ConfigFile)
    rope = file.rope_parameters or file.rope_scaling or _Rope()
    kind = rope.rope_type or rope.type or "default"
    partial = rope.partial_rotary_factor or file.partial_rotary_factor or 1.0
    refusals = {
        f"rope of type '{kind}'": kind != "default",
        f"a rope over {partial} of each head": partial != 1.0,
        "biases": file.attention_bias or file.mlp_bias,
        f"the activation '{file.hidden_act}'": file.hidden_act != "silu",
        "quantised weights": file.quantization_config is not None,
    }
    if found := [what for what, present in refusals.items() if present]:
        raise _unsupported(folder, f"it has {' and '.join(found)}")
    config = LlamaConfig(
        vocabulary=file.vocab_size,
        hidden=file.hidden_size,
        intermediate=file.intermediate_size,
        layers=file.num_hidden_layers,
        heads=file.num_attention_heads,
        kv_heads=file.num_key_value_heads or file.num_attention_heads,
        head_dim=file.head_dim or file.hidden_size // file.num_attention_heads,
        norm_eps=file.rms_norm_eps,
        rope_theta=rope.rope_theta or file.rope_theta or 10_000.0,
        max_positions=file.max_position_embeddings,
        tied=file.tie_word_embeddings,
    )
    if config.heads % config.kv_heads or config.head_dim % 2:
        raise _unsupported(
            folder,
            f"{config.heads} heads over {config.kv_heads} key-value heads of {config.head_dim}",
        )
    return config


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ConfigError(f"{folder}: holds neither {single.name} nor {index.name}")
    names = sorted(set(_decode(index, _read(index), _Index).weight_map.values()))
    for name in names:
        if not (folder / name).is_file():
            raise ConfigError(f"{folder}: {index.name} names {name}, which is missing")
    return [folder / name for name in names]


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error


def _decode(file: Path, raw: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file}: {error}") from error


def _unsupported(folder: Path, found: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{folder}: {found}; we run {_FAMILY} with plain rope, no biases and unquantised weights"
    )
