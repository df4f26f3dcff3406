"""What the queries of a pass look at: the cache, up to each one's own position and no further.

What is attended to is laid out once a pass and serves all of its layers.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tlt.engine.native.attention_segments import Segment
from tlt.engine.native.decode_attention_kernels import (
    AttentionInputs,
    CompiledWindowAttention,
    PassAttention,
    TorchWindowAttention,
    find_kernel,
)
from tlt.engine.native.kv_cache import KvCache
from tlt.models.decoder_spec import DecoderConfig


class RowSpan(NamedTuple):
    """Consecutive positions of one row; what comes before them is cached."""

    row: int
    first: int
    length: int


class KvCacheAttention:
    def __init__(
        self, config: DecoderConfig, cache: KvCache, positions: int, dtype: torch.dtype
    ) -> None:
        self._cache = cache
        self._kv, self._dim = config.kv_heads, config.head_dim
        self._grouped = config.heads // config.kv_heads
        self._scale = config.head_dim**-0.5
        self._dtype = dtype
        self._range = torch.arange(positions, device=cache.device)
        self._kernel = find_kernel(self._dim, positions, dtype, cache.device)

    @property
    def bytes(self) -> int:
        return self._range.nbytes

    def windows(
        self,
        queries: torch.Tensor,
        positions: torch.Tensor,
        segments: Callable[[], Sequence[Segment]],
    ) -> PassAttention:
        """For these positions [rows, window] of each of the first rows."""
        if self._kernel is not None:
            layout = self._cache.layout
            return CompiledWindowAttention(self._kernel, layout, queries, positions, self._scale)
        parts = [self._window(segment, queries, positions) for segment in segments()]
        return TorchWindowAttention(parts, self._scale)

    def stretches(self, queries: torch.Tensor, stretches: Sequence[RowSpan]) -> "SpanAttention":
        own = queries.transpose(0, 1)[None].split([s.length for s in stretches], dim=2)
        reads = [self._look_back(*pair) for pair in zip(stretches, own, strict=True)]
        return SpanAttention(reads, self._grouped, self._scale)

    def places(self, stretches: Sequence[RowSpan]) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and position of each."""
        spans = [self._range[s.first : s.first + s.length] for s in stretches]
        rows = [
            span.new_full((len(span),), s.row) for s, span in zip(stretches, spans, strict=True)
        ]
        return torch.cat(rows), torch.cat(spans)

    def _window(
        self, segment: Segment, queries: torch.Tensor, positions: torch.Tensor
    ) -> AttentionInputs:
        rows = slice(segment.first, segment.last)
        count, window = segment.last - segment.first, positions.shape[1]
        # a view: the queries are not there yet
        own = queries.view(-1, window, self._grouped, self._kv, self._dim)[rows]
        keys, values = self._cache.views(rows, segment.width)
        if segment.level and window == 1:
            return AttentionInputs(own, keys, values, None)
        unseen = self._range[: segment.width] > positions[rows, :, None]
        mask = torch.zeros(unseen.shape, dtype=self._dtype, device=unseen.device)
        mask = mask.masked_fill_(unseen, float("-inf"))[:, :, None]
        mask = mask.expand(-1, -1, self._grouped, -1).reshape(count, 1, -1, segment.width)
        return AttentionInputs(own, keys, values, mask)

    def _look_back(self, stretch: RowSpan, queries: torch.Tensor) -> AttentionInputs:
        width = stretch.first + stretch.length
        keys, values = self._cache.views(slice(stretch.row, stretch.row + 1), width)
        if stretch.first == 0:
            return AttentionInputs(queries, keys, values, None)
        return AttentionInputs(
            queries, keys, values, self._range[:width] <= self._range[stretch.first : width, None]
        )


class SpanAttention:
    def __init__(self, reads: Sequence[AttentionInputs], grouped: int, scale: float) -> None:
        self._reads = reads
        self._grouped = grouped
        self._scale = scale

    def attended(self, layer: int) -> torch.Tensor:
        parts = [
            F.scaled_dot_product_attention(
                read.queries,
                read.keys[layer].repeat(1, self._grouped, 1, 1),
                read.values[layer].repeat(1, self._grouped, 1, 1),
                attn_mask=read.mask,
                is_causal=read.mask is None,
                scale=self._scale,
            )
            for read in self._reads
        ]
        return torch.cat(parts, dim=2)[0].transpose(0, 1)
