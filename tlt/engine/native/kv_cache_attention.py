"""Attention of a pass's queries over the KV cache, each up to its own position.

The layout of a pass is computed once and serves all of its layers.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tlt.engine.native.decode_attention_kernels import (
    AttentionInputs,
    CompiledWindowAttention,
    PassAttention,
    TorchWindowAttention,
    find_kernel,
)
from tlt.engine.native.kv_cache import KvCache
from tlt.engine.native.rows_by_length import Segment
from tlt.models.decoder_spec import DecoderConfig


class RowSpan(NamedTuple):
    """Consecutive positions of one row; those before them are cached."""

    row: int
    first: int
    length: int


class KvCacheAttention:
    def __init__(self, config: DecoderConfig, cache: KvCache) -> None:
        self._cache = cache
        self._kv, self._dim = config.kv_heads, config.head_dim
        # query heads per key head
        self._grouped = config.heads // config.kv_heads
        self._scale = config.head_dim**-0.5
        self._range = torch.arange(cache.positions, device=cache.device)
        self._kernel = find_kernel(self._dim, cache.positions, cache.dtype, cache.device)

    @property
    def bytes(self) -> int:
        return self._range.nbytes

    def window_attention(
        self,
        queries: torch.Tensor,
        positions: torch.Tensor,
        segments: Callable[[], Sequence[Segment]],
    ) -> PassAttention:
        """Prepare attention for positions [rows, window] of the first rows.

        `queries` is a buffer that each layer fills before it attends.
        """
        if self._kernel is not None:
            layout = self._cache.layout
            return CompiledWindowAttention(self._kernel, layout, queries, positions, self._scale)
        parts = [self._window(segment, queries, positions) for segment in segments()]
        return TorchWindowAttention(parts, self._scale)

    def span_attention(self, queries: torch.Tensor, spans: Sequence[RowSpan]) -> "SpanAttention":
        own = queries.transpose(0, 1)[None].split([span.length for span in spans], dim=2)
        parts = [self._span(*pair) for pair in zip(spans, own, strict=True)]
        return SpanAttention(parts, self._grouped, self._scale)

    def span_positions(self, spans: Sequence[RowSpan]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row and the position of each token of the spans."""
        parts = [self._range[span.first : span.first + span.length] for span in spans]
        rows = [
            part.new_full((len(part),), span.row) for span, part in zip(spans, parts, strict=True)
        ]
        return torch.cat(rows), torch.cat(parts)

    def _window(
        self, segment: Segment, queries: torch.Tensor, positions: torch.Tensor
    ) -> AttentionInputs:
        rows = slice(segment.first, segment.last)
        count, window = segment.last - segment.first, positions.shape[1]
        # a view: the buffer is filled later
        own = queries.view(-1, window, self._grouped, self._kv, self._dim)[rows]
        keys, values = self._cache.views(rows, segment.width)
        if segment.level and window == 1:
            return AttentionInputs(own, keys, values, None)
        unseen = self._range[: segment.width] > positions[rows, :, None]
        mask = torch.zeros(unseen.shape, dtype=self._cache.dtype, device=unseen.device)
        mask = mask.masked_fill_(unseen, float("-inf"))[:, :, None]
        mask = mask.expand(-1, -1, self._grouped, -1).reshape(count, 1, -1, segment.width)
        return AttentionInputs(own, keys, values, mask)

    def _span(self, span: RowSpan, queries: torch.Tensor) -> AttentionInputs:
        width = span.first + span.length
        keys, values = self._cache.views(slice(span.row, span.row + 1), width)
        if span.first == 0:
            return AttentionInputs(queries, keys, values, None)
        mask = self._range[:width] <= self._range[span.first : width, None]
        return AttentionInputs(queries, keys, values, mask)


class SpanAttention:
    def __init__(self, parts: Sequence[AttentionInputs], grouped: int, scale: float) -> None:
        self._parts = parts
        self._grouped = grouped
        self._scale = scale

    def attend(self, layer: int) -> torch.Tensor:
        outputs = [
            F.scaled_dot_product_attention(
                part.queries,
                part.keys[layer].repeat(1, self._grouped, 1, 1),
                part.values[layer].repeat(1, self._grouped, 1, 1),
                attn_mask=part.mask,
                is_causal=part.mask is None,
                scale=self._scale,
            )
            for part in self._parts
        ]
        return torch.cat(outputs, dim=2)[0].transpose(0, 1)
