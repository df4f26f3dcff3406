"""The policy's forward pass over cached rows: writes each position's entries, then attends.

A position is written before anything attends to it, so what an ended row left behind is never seen.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tlt.engine.native.cache import Cache
from tlt.engine.native.scratch import Buffers, Scratch
from tlt.engine.native.segments import Segment
from tlt.engine.native.states import States
from tlt.engine.native.weights import Layer, Linear, Weights
from tlt.models.decoder import DecoderConfig
from tlt.models.rope import rotations


class Piece(NamedTuple):
    """Consecutive tokens of one row; what comes before them is cached."""

    row: int
    first: int
    tokens: Sequence[int]


class _Reads(NamedTuple):
    """What some rows attend with and to: queries; per layer keys and values; a mask."""

    queries: torch.Tensor
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    mask: torch.Tensor | None


class Network:
    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        cache: Cache,
        states: States,
        positions: int,
        most_tokens: int,
    ) -> None:
        """No pass is over more than `most_tokens`."""
        self._config = config
        self._weights = weights
        self._cache = cache
        self._states = states
        self._heads, self._kv, self._dim = config.heads, config.kv_heads, config.head_dim
        self._grouped = config.heads // config.kv_heads
        self._scale = config.head_dim**-0.5
        self._dtype, device = weights.embedding.dtype, weights.embedding.device
        self._buffers = Buffers(config, most_tokens, self._dtype, device)
        wide = self._buffers.wide

        def floor(width: int) -> torch.Tensor:
            return torch.tensor((width * config.norm_eps) ** 0.5, dtype=wide, device=device)

        self._floor, self._head_floor = floor(config.hidden), floor(config.head_dim)
        self._rope = rotations(config.rope, config.head_dim, positions, device).to(
            wide.to_complex()
        )
        self._range = torch.arange(max(positions, most_tokens), device=device)

    @property
    def bytes(self) -> int:
        return self._buffers.bytes

    def decode(
        self, tokens: torch.Tensor, positions: torch.Tensor, segments: Sequence[Segment]
    ) -> torch.Tensor:
        """Logits after one token in each of the first rows."""
        rows = self._range[: len(tokens)]
        scratch = self._scratch(tokens, positions)
        addresses = self._cache.addresses(rows, positions)
        places = self._states.places(rows, positions)
        reads = [self._read(segment, scratch.queries, positions) for segment in segments]
        for index, layer in enumerate(self._weights.layers):
            self._enter(scratch, index, layer, addresses, places)
            attended = [
                F.scaled_dot_product_attention(
                    read.queries,
                    read.keys[index],
                    read.values[index],
                    attn_mask=read.mask,
                    scale=self._scale,
                ).transpose(1, 2)
                for read in reads
            ]
            self._absorb(scratch, layer, attended[0] if len(reads) == 1 else torch.cat(attended))
        normed = self._final_norm(scratch.x)
        self._states.keep(self._config.layers, places, normed)
        return F.linear(normed, self._weights.head).to(self._buffers.wide)

    def prefill(self, pieces: Sequence[Piece]) -> None:
        """Cache these tokens, which nothing is drawn from."""
        device = self._range.device
        tokens = torch.tensor([token for piece in pieces for token in piece.tokens], device=device)
        spans = [self._range[p.first : p.first + len(p.tokens)] for p in pieces]
        positions = torch.cat(spans)
        rows = torch.cat([s.new_full((len(s),), p.row) for p, s in zip(pieces, spans, strict=True)])
        scratch = self._scratch(tokens, positions)
        addresses = self._cache.addresses(rows, positions)
        places = self._states.places(rows, positions)
        own = scratch.queries.transpose(0, 1)[None].split([len(s) for s in spans], dim=2)
        reads = [self._look_back(*pair) for pair in zip(pieces, own, strict=True)]
        for index, layer in enumerate(self._weights.layers):
            self._enter(scratch, index, layer, addresses, places)
            attended = [
                F.scaled_dot_product_attention(
                    read.queries,
                    read.keys[index].repeat(1, self._grouped, 1, 1),
                    read.values[index].repeat(1, self._grouped, 1, 1),
                    attn_mask=read.mask,
                    is_causal=read.mask is None,
                    scale=self._scale,
                )
                for read in reads
            ]
            self._absorb(scratch, layer, torch.cat(attended, dim=2)[0].transpose(0, 1))
        if self._states.wants(self._config.layers):
            self._states.keep(self._config.layers, places, self._final_norm(scratch.x))

    def _enter(
        self,
        scratch: Scratch,
        index: int,
        layer: Layer,
        addresses: torch.Tensor,
        places: torch.Tensor,
    ) -> None:
        """Queries, keys and values, the first two turned to their positions, the others cached."""
        self._states.keep(index, places, scratch.x)
        self._normalise(scratch)
        _project(scratch.normed, layer.qkv, scratch.qkv)
        if layer.head_norms is not None:
            heads = scratch.turned
            length = torch.linalg.vector_norm(heads, dim=-1, keepdim=True, dtype=self._buffers.wide)
            torch.div(heads, length.hypot_(self._head_floor), out=heads).mul_(layer.head_norms)
        scratch.rotate()
        entries = scratch.entries.reshape(-1, self._dim)
        self._cache.layers[index].index_copy_(0, addresses, entries)

    def _absorb(self, scratch: Scratch, layer: Layer, attended: torch.Tensor) -> None:
        """What attention found, then the feed-forward part, are added to x."""
        _add(scratch.x, attended.reshape(-1, self._heads * self._dim), layer.out)
        self._normalise(scratch)
        _project(scratch.normed, layer.gate_up, scratch.gate_up)
        _add(scratch.x, F.silu(scratch.gate, inplace=True).mul_(scratch.up), layer.down)

    def _normalise(self, scratch: Scratch) -> None:
        """RMSNorm without its constant factors, which the weights hold: x / sqrt(|x|² + floor²)."""
        x, length = scratch.x, scratch.length
        torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=length.dtype, out=length)
        torch.div(x, length.hypot_(self._floor), out=scratch.normed)

    def _scratch(self, tokens: torch.Tensor, positions: torch.Tensor) -> Scratch:
        scratch = Scratch(self._config, self._buffers, self._rope.index_select(0, positions))
        torch.index_select(self._weights.embedding, 0, tokens, out=scratch.x)
        return scratch

    def _final_norm(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (self._config.hidden,), self._weights.norm, self._config.norm_eps)

    def _read(self, segment: Segment, queries: torch.Tensor, positions: torch.Tensor) -> _Reads:
        rows = slice(segment.first, segment.last)
        count = segment.last - segment.first
        own = queries[rows].view(count, self._grouped, self._kv, self._dim).transpose(1, 2)
        keys, values = self._cache.views(rows, segment.width)
        if segment.level:
            return _Reads(own, keys, values, None)
        unseen = self._range[: segment.width] > positions[rows, None]
        mask = torch.zeros(unseen.shape, dtype=self._dtype, device=unseen.device)
        mask = mask.masked_fill_(unseen, float("-inf"))[:, None, None]
        return _Reads(own, keys, values, mask.expand(-1, 1, self._grouped, -1))

    def _look_back(self, piece: Piece, queries: torch.Tensor) -> _Reads:
        width = piece.first + len(piece.tokens)
        keys, values = self._cache.views(slice(piece.row, piece.row + 1), width)
        if piece.first == 0:
            return _Reads(queries, keys, values, None)
        return _Reads(
            queries, keys, values, self._range[:width] <= self._range[piece.first : width, None]
        )


def _project(x: torch.Tensor, linear: Linear, out: torch.Tensor) -> None:
    if linear.bias is None:
        torch.mm(x, linear.matrix, out=out)
    else:
        torch.addmm(linear.bias, x, linear.matrix, out=out)


def _add(x: torch.Tensor, y: torch.Tensor, linear: Linear) -> None:
    x.addmm_(y, linear.matrix)
    if linear.bias is not None:
        x.add_(linear.bias)
