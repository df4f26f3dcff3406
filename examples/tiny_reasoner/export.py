"""Invariant: the folder holds a complete Hugging Face model, weights in bf16, config in fp32.

`dtype` in the config is float32 so that a plain `from_pretrained` computes in fp32.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig

from examples.tiny_reasoner.network import Layer, Network, Shape
from examples.tiny_reasoner.vocabulary import BOS, EOS, PAD, write_tokenizer


def write_model(network: Network, folder: Path) -> None:
    """Write config.json, generation_config.json, the tokenizer and model.safetensors."""
    write_tokenizer(folder)
    config = llama_config(network.shape)
    config.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, do_sample=True, temperature=1.0
    ).save_pretrained(folder)
    weights = {name: t.to(torch.bfloat16).contiguous() for name, t in llama_weights(network)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def round_to_bf16(network: Network) -> None:
    """Give the parameters the values that the file will hold."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))


def llama_config(shape: Shape) -> LlamaConfig:
    """Return the shape as a Transformers config."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.positions,
        rms_norm_eps=shape.eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        dtype="float32",
    )


def llama_weights(network: Network) -> list[tuple[str, Tensor]]:
    """Return the parameters under Transformers' names, without the tied output matrix."""
    weights = [
        ("model.embed_tokens.weight", network.embedding.detach()),
        ("model.norm.weight", network.norm.detach()),
    ]
    for index, layer in enumerate(network.blocks):
        named = _layer_weights(layer, network.shape)
        weights += [(f"model.layers.{index}.{name}.weight", t) for name, t in named.items()]
    return weights


def _layer_weights(layer: Layer, shape: Shape) -> dict[str, Tensor]:
    key_rows = shape.kv_heads * shape.head_dim
    query, key, value = layer.qkv.detach().split((shape.hidden, key_rows, key_rows))
    gate, up = layer.gate_up.detach().chunk(2)
    return {
        "input_layernorm": layer.attention_norm.detach(),
        "self_attn.q_proj": query,
        "self_attn.k_proj": key,
        "self_attn.v_proj": value,
        "self_attn.o_proj": layer.attention_out.detach(),
        "post_attention_layernorm": layer.ffn_norm.detach(),
        "mlp.gate_proj": gate,
        "mlp.up_proj": up,
        "mlp.down_proj": layer.ffn_out.detach(),
    }
