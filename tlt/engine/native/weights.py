"""The fused weights compute what the Hugging Face ones do, in a layout that decodes faster.

Norm weights are folded into the matrix behind them; the two halves of a rotary pair lie side by
side, so that rope is one complex product; query heads of one key-value head lie a stride apart,
so that they fold into the query length without a copy. The buffers are allocated once: new
weights are written in place.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from tlt.models.decoder import EMBEDDING, FINAL_NORM, HEAD, DecoderConfig


class Linear(NamedTuple):
    # to multiply from the right: a view [in, out] of a buffer [out, in]
    matrix: torch.Tensor
    bias: torch.Tensor | None


class Layer(NamedTuple):
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    # [query and key heads, width of a head]
    head_norms: torch.Tensor | None


class Weights:
    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        def buffer(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        def linear(outputs: int, inputs: int, biased: bool) -> Linear:
            return Linear(buffer(outputs, inputs).t(), buffer(outputs) if biased else None)

        self._config = config
        heads, kv_heads = config.heads, config.kv_heads
        hidden, dim = config.hidden, config.head_dim
        self.layers = [
            Layer(
                qkv=linear((heads + 2 * kv_heads) * dim, hidden, config.qkv_bias),
                out=linear(hidden, heads * dim, config.out_bias),
                gate_up=linear(2 * config.intermediate, hidden, config.mlp_bias),
                down=linear(hidden, config.intermediate, config.mlp_bias),
                head_norms=buffer(heads + kv_heads, dim) if config.head_norms else None,
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
        device, hidden = self.embedding.device, self._config.hidden
        # products of rounded weights are rounded once, when they are stored
        wide = torch.promote_types(self.embedding.dtype, torch.float32)

        def weight(name: str, kind: str = "weight") -> torch.Tensor:
            return weights[f"{prefix}{name}.{kind}"].to(device, wide)

        def fill(linear: Linear, matrix: torch.Tensor, *biased: torch.Tensor) -> None:
            linear.matrix.t().copy_(matrix)
            if linear.bias is not None:
                linear.bias.copy_(torch.cat(biased))

        def biases(linear: Linear, *names: str) -> list[torch.Tensor]:
            return [] if linear.bias is None else [weight(name, "bias") for name in names]

        q, k, v = (weight(f"self_attn.{name}_proj") for name in "qkv")
        # RMSNorm is x / |x| times the root of the width; `Network` only divides
        norm = weight("input_layernorm") * hidden**0.5
        fused = torch.cat([self._queries(q), self._keys(k), v]) * norm
        parts = biases(layer.qkv, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        if parts:
            parts = [self._queries(parts[0]), self._keys(parts[1]), parts[2]]
        fill(layer.qkv, fused, *parts)
        out = self._grouped(weight("self_attn.o_proj").t()).t()
        fill(layer.out, out, *biases(layer.out, "self_attn.o_proj"))
        norm = weight("post_attention_layernorm") * hidden**0.5
        gate_up = torch.cat([weight("mlp.gate_proj"), weight("mlp.up_proj")]) * norm
        fill(layer.gate_up, gate_up, *biases(layer.gate_up, "mlp.gate_proj", "mlp.up_proj"))
        fill(layer.down, weight("mlp.down_proj"), *biases(layer.down, "mlp.down_proj"))
        if layer.head_norms is not None:
            self._load_head_norms(
                layer.head_norms, weight("self_attn.q_norm"), weight("self_attn.k_norm")
            )

    def _load_head_norms(self, norms: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> None:
        config = self._config
        root = config.head_dim**0.5
        norms[: config.heads] = self._keys(q) * root
        norms[config.heads :] = self._keys(k) * root

    def _queries(self, rows: torch.Tensor) -> torch.Tensor:
        return self._grouped(self._keys(rows))

    def _keys(self, rows: torch.Tensor) -> torch.Tensor:
        """[heads * dim, ...] with the halves of each head -> with its pairs."""
        pairs = rows.unflatten(0, (-1, 2, self._config.head_dim // 2))
        return pairs.transpose(1, 2).flatten(0, 2)

    def _grouped(self, rows: torch.Tensor) -> torch.Tensor:
        """[heads * dim, ...] with the heads of a group together -> a stride apart."""
        config = self._config
        groups = rows.unflatten(0, (config.kv_heads, -1, config.head_dim))
        return groups.transpose(0, 1).flatten(0, 2)
