"""A layer's weights, equivalent to the Hugging Face ones, in a layout that decodes faster.

The weights of a norm are folded into the matrix behind it. The two numbers of a rotary pair are
adjacent, so that rope is one complex product. The query heads of one key-value head are a stride
apart, so that they fold into the query length without a copy. New weights are written in place.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from tlt.models.decoder_spec import DecoderConfig


class Linear(NamedTuple):
    # a view [in, out] of a buffer [out, in], to be multiplied from the right
    matrix: torch.Tensor
    bias: torch.Tensor | None


class Layer(NamedTuple):
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    # [query and key heads, width of a head]
    head_norms: torch.Tensor | None


def new_linear(
    outputs: int, inputs: int, biased: bool, dtype: torch.dtype, device: torch.device
) -> Linear:
    matrix = torch.empty(outputs, inputs, dtype=dtype, device=device)
    return Linear(matrix.t(), matrix.new_empty(outputs) if biased else None)


def new_layer(
    config: DecoderConfig, inputs: int, dtype: torch.dtype, device: torch.device
) -> Layer:
    """Allocate a layer whose queries, keys and values are computed from `inputs` numbers."""

    def linear(outputs: int, inputs: int, biased: bool) -> Linear:
        return new_linear(outputs, inputs, biased, dtype, device)

    heads, kv_heads = config.heads, config.kv_heads
    hidden, dim = config.hidden, config.head_dim
    norms = torch.empty(heads + kv_heads, dim, dtype=dtype, device=device)
    return Layer(
        qkv=linear((heads + 2 * kv_heads) * dim, inputs, config.qkv_bias),
        out=linear(hidden, heads * dim, config.out_bias),
        gate_up=linear(2 * config.intermediate, hidden, config.mlp_bias),
        down=linear(hidden, config.intermediate, config.mlp_bias),
        head_norms=norms if config.head_norms else None,
    )


class LayerFiller:
    """Write a layer's weights; `weight` returns one by its name, in a dtype to compute with."""

    def __init__(
        self, config: DecoderConfig, layer: Layer, weight: Callable[[str], torch.Tensor]
    ) -> None:
        self._config = config
        self._layer = layer
        self._weight = weight

    def fill(self, entrance: torch.Tensor) -> None:
        """Write all weights; each input of queries, keys and values is scaled by `entrance`."""
        layer, weight, root = self._layer, self._weight, self._config.hidden**0.5
        q, k, v = (weight(f"self_attn.{name}_proj.weight") for name in "qkv")
        fused = torch.cat([self._queries(q), self._keys(k), v]) * entrance
        parts = self._biases(layer.qkv, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        if parts:
            parts = [self._queries(parts[0]), self._keys(parts[1]), parts[2]]
        fill_linear(layer.qkv, fused, *parts)
        out = self._grouped(weight("self_attn.o_proj.weight").t()).t()
        fill_linear(layer.out, out, *self._biases(layer.out, "self_attn.o_proj"))
        # RMSNorm is x / |x| times the root of the width: the pass only divides by |x|
        norm = weight("post_attention_layernorm.weight") * root
        gate_up = torch.cat([weight("mlp.gate_proj.weight"), weight("mlp.up_proj.weight")]) * norm
        biases = self._biases(layer.gate_up, "mlp.gate_proj", "mlp.up_proj")
        fill_linear(layer.gate_up, gate_up, *biases)
        down = weight("mlp.down_proj.weight")
        fill_linear(layer.down, down, *self._biases(layer.down, "mlp.down_proj"))
        if layer.head_norms is not None:
            self._fill_head_norms(layer.head_norms)

    def _biases(self, linear: Linear, *names: str) -> list[torch.Tensor]:
        return [] if linear.bias is None else [self._weight(f"{name}.bias") for name in names]

    def _fill_head_norms(self, norms: torch.Tensor) -> None:
        config = self._config
        root = config.head_dim**0.5
        norms[: config.heads] = self._keys(self._weight("self_attn.q_norm.weight")) * root
        norms[config.heads :] = self._keys(self._weight("self_attn.k_norm.weight")) * root

    def _queries(self, rows: torch.Tensor) -> torch.Tensor:
        return self._grouped(self._keys(rows))

    def _keys(self, rows: torch.Tensor) -> torch.Tensor:
        """Reorder [heads * dim, ...] from the halves of each head to its rotary pairs."""
        pairs = rows.unflatten(0, (-1, 2, self._config.head_dim // 2))
        return pairs.transpose(1, 2).flatten(0, 2)

    def _grouped(self, rows: torch.Tensor) -> torch.Tensor:
        """Reorder [heads * dim, ...] from adjacent heads of a group to heads a stride apart."""
        config = self._config
        groups = rows.unflatten(0, (config.kv_heads, -1, config.head_dim))
        return groups.transpose(0, 1).flatten(0, 2)


def fill_linear(linear: Linear, matrix: torch.Tensor, *biases: torch.Tensor) -> None:
    linear.matrix.t().copy_(matrix)
    if linear.bias is not None:
        linear.bias.copy_(torch.cat(biases))
