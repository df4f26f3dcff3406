"""The fused weights compute what the Hugging Face ones do, in a layout that decodes faster.

Norm weights are folded into the matrix behind them; the two halves of a rotary pair lie side by
side, so that rope is one complex product; query heads of one key-value head lie a stride apart,
so that they fold into the query length without a copy. The buffers are allocated once: new
weights are written in place.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from tlt.models.llama import EMBEDDING, FINAL_NORM, HEAD, LlamaConfig


class Layer(NamedTuple):
    """Matrices to multiply from the right: views [in, out] of buffers [out, in]."""

    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Weights:
    def __init__(self, config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> None:
        def buffer(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        def matrix(outputs: int, inputs: int) -> torch.Tensor:
            return buffer(outputs, inputs).t()

        self._config = config
        heads, kv_heads = config.heads, config.kv_heads
        hidden, dim = config.hidden, config.head_dim
        self.layers = [
            Layer(
                qkv=matrix((heads + 2 * kv_heads) * dim, hidden),
                out=matrix(hidden, heads * dim),
                gate_up=matrix(2 * config.intermediate, hidden),
                down=matrix(hidden, config.intermediate),
            )
            for _ in range(config.layers)
        ]
        self.embedding = buffer(config.vocabulary, hidden)
        self.norm = buffer(hidden)
        self.head = self.embedding if config.tied else buffer(config.vocabulary, hidden)

    @torch.inference_mode()
    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        for index, layer in enumerate(self.layers):
            self._load_layer(layer, weights, f"model.layers.{index}.")
        self.embedding.copy_(weights[EMBEDDING])
        self.norm.copy_(weights[FINAL_NORM])
        if not self._config.tied:
            self.head.copy_(weights[HEAD])

    def _load_layer(self, layer: Layer, weights: Mapping[str, torch.Tensor], prefix: str) -> None:
        config = self._config
        device, hidden, dim = layer.qkv.device, config.hidden, config.head_dim
        # products of rounded weights are rounded once, when they are stored
        wide = torch.promote_types(layer.qkv.dtype, torch.float32)

        def weight(name: str) -> torch.Tensor:
            return weights[f"{prefix}{name}.weight"].to(device, wide)

        def paired(rows: torch.Tensor) -> torch.Tensor:
            """[..., dim, hidden] with halves -> with pairs."""
            return rows.unflatten(-2, (2, dim // 2)).transpose(-3, -2).flatten(-3, -2)

        grouped = (config.kv_heads, config.heads // config.kv_heads, dim)
        # RMSNorm is x / |x| times the root of the width; `Network` only divides
        norm = weight("input_layernorm") * hidden**0.5
        q = paired((weight("self_attn.q_proj") * norm).unflatten(0, grouped)).transpose(0, 1)
        k = paired((weight("self_attn.k_proj") * norm).unflatten(0, (-1, dim)))
        v = weight("self_attn.v_proj") * norm
        layer.qkv.t().copy_(torch.cat([q.reshape(-1, hidden), k.reshape(-1, hidden), v]))
        out = weight("self_attn.o_proj").unflatten(1, grouped).transpose(1, 2)
        layer.out.t().copy_(out.reshape(hidden, -1))
        norm = weight("post_attention_layernorm") * hidden**0.5
        layer.gate_up.t().copy_(torch.cat([weight("mlp.gate_proj"), weight("mlp.up_proj")]) * norm)
        layer.down.t().copy_(weight("mlp.down_proj"))
