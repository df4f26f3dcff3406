"""Read a policy's config.json, or refuse the folder in one line: the problem, and what we run.

The file is read with Transformers' defaults and stricter than by Transformers, which fills in a
missing size: a job is refused when it is submitted, not when its weights are loaded.
"""

from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from tlt.errors import ConfigError, UnsupportedModel
from tlt.models.decoder_spec import DecoderConfig
from tlt.models.rope import LinearRope, Llama3Rope, PlainRope, Rope, YarnRope, yarn_scale

_T = TypeVar("_T")


class _RopeFile(msgspec.Struct):
    rope_theta: float | None = None
    rope_type: str | None = None
    type: str | None = None
    partial_rotary_factor: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class _ConfigFile(msgspec.Struct):
    """config.json with rope as version 5 of Transformers writes it and as version 4 did."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float | None = None
    rope_scaling: _RopeFile | None = None
    rope_parameters: _RopeFile | None = None
    partial_rotary_factor: float | None = None
    use_sliding_window: bool = False
    quantization_config: dict[str, object] | None = None


class _Architecture(msgspec.Struct):
    architectures: list[str] | None = None
    # of a mixture of experts, by the key that its family has
    num_experts: int | None = None
    num_local_experts: int | None = None
    n_routed_experts: int | None = None

    def __str__(self) -> str:
        experts = self.num_experts or self.num_local_experts or self.n_routed_experts
        mixture = "" if experts is None else f", a mixture of {experts} experts"
        return f"architectures is {self.architectures}{mixture}"


class _Family(NamedTuple):
    """Properties that a family's code fixes; None where config.json states them."""

    qkv_bias: bool | None = None
    out_bias: bool | None = None
    mlp_bias: bool | None = None
    head_norms: bool = False
    head_dim: int | None = None
    positions: int = 32768
    windows: bool = True


_FAMILIES = {
    "LlamaForCausalLM": _Family(positions=2048, windows=False),
    "Qwen2ForCausalLM": _Family(qkv_bias=True, out_bias=False, mlp_bias=False),
    "Qwen3ForCausalLM": _Family(mlp_bias=False, head_norms=True, head_dim=128),
}


def read_config(folder: Path) -> DecoderConfig:
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such model folder")
    path = folder / "config.json"
    # the family first, because another family's config.json may lack required fields
    found = read_json(path, _Architecture)
    named = found.architectures or []
    if len(named) != 1 or named[0] not in _FAMILIES:
        raise unsupported(folder, str(found))
    family = _FAMILIES[named[0]]
    file = read_json(path, _ConfigFile)
    positions = file.max_position_embeddings or family.positions
    rope = _read_rope(folder, file, positions)
    refusals = {
        f"the activation '{file.hidden_act}'": file.hidden_act != "silu",
        "quantised weights": file.quantization_config is not None,
        "a sliding window": file.use_sliding_window and family.windows,
    }
    if refused := [what for what, present in refusals.items() if present]:
        raise unsupported(folder, f"it has {' and '.join(refused)}")
    heads = file.num_attention_heads
    config = DecoderConfig(
        vocabulary=file.vocab_size,
        hidden=file.hidden_size,
        intermediate=file.intermediate_size,
        layers=file.num_hidden_layers,
        heads=heads,
        kv_heads=file.num_key_value_heads or heads,
        head_dim=file.head_dim or family.head_dim or file.hidden_size // heads,
        norm_eps=file.rms_norm_eps,
        rope=rope,
        max_positions=positions,
        tied=file.tie_word_embeddings,
        qkv_bias=file.attention_bias if family.qkv_bias is None else family.qkv_bias,
        out_bias=file.attention_bias if family.out_bias is None else family.out_bias,
        mlp_bias=file.mlp_bias if family.mlp_bias is None else family.mlp_bias,
        head_norms=family.head_norms,
    )
    if config.heads % config.kv_heads or config.head_dim % 2:
        raise unsupported(
            folder,
            f"{config.heads} heads over {config.kv_heads} key-value heads of {config.head_dim}",
        )
    return config


def unsupported(folder: Path, problem: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{folder}: {problem}; we run {', '.join(_FAMILIES)}, with the rope settings default, "
        "linear, llama3 and yarn, without sliding windows, unquantised"
    )


def read_json(path: Path, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from error


def _read_rope(folder: Path, file: _ConfigFile, positions: int) -> Rope:
    parameters = file.rope_parameters or file.rope_scaling or _RopeFile()
    theta = parameters.rope_theta or file.rope_theta or 10_000.0
    kind = parameters.rope_type or parameters.type or "default"
    partial = parameters.partial_rotary_factor or file.partial_rotary_factor or 1.0
    if partial != 1.0:
        raise unsupported(folder, f"it has a rope over {partial} of each head")
    original = parameters.original_max_position_embeddings or positions
    factor, low, high = parameters.factor, parameters.low_freq_factor, parameters.high_freq_factor
    if kind in ("linear", "llama3") and factor is None:
        raise unsupported(folder, f"its rope of type '{kind}' lacks a factor")
    match kind:
        case "default":
            return PlainRope(theta=theta)
        case "linear" if factor is not None:
            return LinearRope(theta=theta, factor=factor)
        case "llama3" if factor is not None:
            if low is None or high is None:
                raise unsupported(folder, "its rope of type 'llama3' lacks a frequency factor")
            return Llama3Rope(
                theta=theta, factor=factor, low=low, high=high, original_positions=original
            )
        case "yarn":
            factor = factor or positions / original
            scale = parameters.attention_factor
            if scale is None:
                scale = yarn_scale(factor, parameters.mscale, parameters.mscale_all_dim)
            return YarnRope(
                theta=theta,
                factor=factor,
                original_positions=original,
                fast=parameters.beta_fast or 32,
                slow=parameters.beta_slow or 1,
                truncate=parameters.truncate,
                scale=scale,
            )
        case _:
            raise unsupported(folder, f"it has a rope of type '{kind}'")
