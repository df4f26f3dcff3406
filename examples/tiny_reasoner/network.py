"""Invariant: the same function as transformers' Llama with tied embeddings, written for speed.

Query, key and value share a matrix, as do gate and up; attention is two batched products,
because the fused CPU kernel is slow at heads this narrow.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.tiny_reasoner.vocabulary import MAX_POSITIONS, VOCAB_SIZE


@dataclass(frozen=True)
class Shape:
    """The widths and depth of the network."""

    layers: int = 48
    hidden: int = 64
    ffn: int = 128
    heads: int = 2
    kv_heads: int = 1
    vocab: int = VOCAB_SIZE
    positions: int = MAX_POSITIONS
    rope_theta: float = 10_000.0
    eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True)
class Reach:
    """Rotation tables and the bias that attention adds to its scores."""

    cos: Tensor
    sin: Tensor
    bias: Tensor


class KeyValues:
    """The keys and values of every layer up to `length`, for decoding."""

    def __init__(self, shape: Shape, rows: int, positions: int) -> None:
        size = (shape.layers, rows, shape.kv_heads, positions, shape.head_dim)
        self.keys = torch.zeros(size)
        self.values = torch.zeros(size)
        self.length = 0

    def extended(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of a layer and return all of them."""
        end = self.length + key.shape[2]
        self.keys[layer, :, :, self.length : end] = key
        self.values[layer, :, :, self.length : end] = value
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def keep(self, rows: Tensor) -> None:
        """Drop all other rows."""
        self.keys = self.keys[:, rows]
        self.values = self.values[:, rows]


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.attention_norm = nn.Parameter(torch.ones(shape.hidden))
        self.ffn_norm = nn.Parameter(torch.ones(shape.hidden))
        self.qkv = _matrix(heads, shape.hidden, 0.8)
        self.attention_out = _matrix(shape.hidden, shape.hidden, 0.5)
        self.gate_up = _matrix(2 * shape.ffn, shape.hidden, 0.8)
        self.ffn_out = _matrix(shape.hidden, shape.ffn, 0.5)

    def forward(
        self, x: Tensor, reach: Reach, cache: KeyValues | None = None, index: int = 0
    ) -> Tensor:
        x = x + self._attended(x, reach, cache, index)
        gate, up = _product(_normed(x, self.ffn_norm, self.shape.eps), self.gate_up).chunk(2, -1)
        return x + _product(F.silu(gate) * up, self.ffn_out)

    def _attended(self, x: Tensor, reach: Reach, cache: KeyValues | None, index: int) -> Tensor:
        shape, (rows, length, _) = self.shape, x.shape
        fused = _product(_normed(x, self.attention_norm, shape.eps), self.qkv)
        heads = fused.view(rows, length, -1, shape.head_dim).transpose(1, 2)
        turned = shape.heads + shape.kv_heads
        query, key = _rotated(heads[:, :turned], reach).split((shape.heads, shape.kv_heads), 1)
        value = heads[:, turned:]
        if cache is not None:
            key, value = cache.extended(index, key, value)
        key, value = key.flatten(0, 1), value.flatten(0, 1)
        # The query heads of a key head lie one after the other: they become one longer query.
        query = query.reshape(key.shape[0], -1, shape.head_dim)
        bias = reach.bias.repeat(shape.heads // shape.kv_heads, 1)
        scores = torch.baddbmm(bias, query, key.mT, alpha=shape.head_dim**-0.5)
        mixed = torch.bmm(scores.softmax(-1), value)
        mixed = mixed.view(rows, shape.heads, length, shape.head_dim)
        return _product(mixed.transpose(1, 2).reshape(rows, length, -1), self.attention_out)


class Network(nn.Module):
    """Ids to logits; `forward` computes in `dtype` whatever the parameters are kept in."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Parameter(torch.randn(shape.vocab, shape.hidden) * 0.02)
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        self.blocks = [Layer(shape) for _ in range(shape.layers)]
        self.layers = nn.ModuleList(self.blocks)
        self.cos, self.sin = _rotation(shape)

    def forward(
        self, ids: Tensor, cache: KeyValues | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        start = cache.length if cache is not None else 0
        end = start + ids.shape[1]
        bias = torch.full((ids.shape[1], end), float("-inf"), dtype=dtype).triu(start + 1)
        reach = Reach(self.cos[start:end].to(dtype), self.sin[start:end].to(dtype), bias)
        x = F.embedding(ids, self.embedding).to(dtype)
        for index, layer in enumerate(self.blocks):
            x = layer(x, reach, cache, index)
        if cache is not None:
            cache.length = end
        return _product(_normed(x, self.norm, self.shape.eps), self.embedding)


def _matrix(rows: int, columns: int, gain: float) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * (gain / columns**0.5))


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)


def _rotation(shape: Shape) -> tuple[Tensor, Tensor]:
    half = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
    angles = torch.outer(torch.arange(shape.positions).float(), shape.rope_theta**-half)
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def _rotated(x: Tensor, reach: Reach) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * reach.cos + torch.cat((-second, first), -1) * reach.sin
