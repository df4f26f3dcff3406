"""A `Llama` holds exactly the weights that its config implies: every name, in its shape, no other.

Names and layouts are those of Hugging Face's `LlamaForCausalLM`.
"""

from collections.abc import Mapping

import msgspec
import torch


class LlamaConfig(msgspec.Struct, frozen=True, kw_only=True):
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    tied: bool


class Llama(msgspec.Struct, frozen=True, kw_only=True):
    config: LlamaConfig
    weights: Mapping[str, torch.Tensor]


EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def weight_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    hidden, wide = config.hidden, config.intermediate
    queries, pairs = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layer = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (pairs, hidden),
        "self_attn.v_proj.weight": (pairs, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
    }
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocabulary, hidden)}
    for index in range(config.layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes[FINAL_NORM] = (hidden,)
    if not config.tied:
        shapes[HEAD] = (config.vocabulary, hidden)
    return shapes


def mismatch(config: LlamaConfig, found: Mapping[str, tuple[int, ...]]) -> str | None:
    """In a few words, what keeps these weights from being this model's; None if nothing does.

    A tied head may be listed or not: it is the embedding.
    """
    expected = weight_shapes(config)
    for name, shape in expected.items():
        if name not in found:
            return f"the weight {name} is missing"
        if found[name] != shape:
            return f"the weight {name} is {list(found[name])}, config.json implies {list(shape)}"
    unknown = sorted(found.keys() - expected.keys() - {HEAD})
    return f"the weight {unknown[0]} belongs to no part that we run" if unknown else None
