"""A `Decoder` holds exactly the weights that its config implies: every name, its shape, no other.

Names and layouts are those of Hugging Face's Llama, Qwen2 and Qwen3, which differ in their biases
and in normalising queries and keys.
"""

from collections.abc import Mapping

import msgspec
import torch

from tlt.errors import ConfigError
from tlt.models.rope import Rope


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    max_positions: int
    # the head's weights are the embedding's
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    # each head's query and key pass an RMSNorm before the rotation
    head_norms: bool


class Decoder(msgspec.Struct, frozen=True, kw_only=True):
    config: DecoderConfig
    weights: Mapping[str, torch.Tensor]


EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def weight_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    hidden, layer = config.hidden, _layer_shapes(config)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocabulary, hidden)}
    for index in range(config.layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes[FINAL_NORM] = (hidden,)
    if not config.tied:
        shapes[HEAD] = (config.vocabulary, hidden)
    return shapes


def _layer_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    hidden, wide = config.hidden, config.intermediate
    queries, pairs = config.heads * config.head_dim, config.kv_heads * config.head_dim
    projections = {
        "self_attn.q_proj": (queries, hidden, config.qkv_bias),
        "self_attn.k_proj": (pairs, hidden, config.qkv_bias),
        "self_attn.v_proj": (pairs, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, queries, config.out_bias),
        "mlp.gate_proj": (wide, hidden, config.mlp_bias),
        "mlp.up_proj": (wide, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, wide, config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.head_norms:
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (outputs, inputs, biased) in projections.items():
        shapes[f"{name}.weight"] = (outputs, inputs)
        if biased:
            shapes[f"{name}.bias"] = (outputs,)
    return shapes | {f"{name}.weight": (width,) for name, width in norms.items()}


def describe_mismatch(config: DecoderConfig, actual: Mapping[str, tuple[int, ...]]) -> str | None:
    """Say in a few words why weights of these shapes aren't this model's; None if they are.

    A tied head may be listed or not, because it is the embedding.
    """
    expected = weight_shapes(config)
    for name, shape in expected.items():
        if name not in actual:
            return f"the weight {name} is missing"
        if actual[name] != shape:
            return f"the weight {name} is {list(actual[name])}, config.json implies {list(shape)}"
    unknown = sorted(actual.keys() - expected.keys() - {HEAD})
    return f"the weight {unknown[0]} belongs to no part that we run" if unknown else None


def require_divisible(
    ranks: int, kv_heads: int, intermediate: int, model: str, tokens: int | None = None
) -> None:
    """Raise ConfigError if ranks can't share a layer's heads and width evenly, or `tokens`."""
    for count, what in (
        (kv_heads, "heads of keys and values"),
        (intermediate, "numbers between its feed-forward matrices"),
        (tokens or 0, "tokens to propose (drafter.hot_tokens)"),
    ):
        if count % ranks:
            raise ConfigError(
                f"rollout.tensor_parallel: {ranks} ranks can't share the {model}'s {count} {what} "
                "evenly"
            )
