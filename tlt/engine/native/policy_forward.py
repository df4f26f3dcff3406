"""The policy's forward pass over cached rows: writes each position's entries, then attends.

A position is written before anything attends to it, so what an ended row, or a draft that was not
accepted, left behind is never seen.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tlt.engine.native.attention_segments import Segment
from tlt.engine.native.captured_hidden_states import CapturedStates
from tlt.engine.native.decode_attention_kernels import PassAttention
from tlt.engine.native.kv_cache import KvCache
from tlt.engine.native.kv_cache_attention import KvCacheAttention, RowSpan, SpanAttention
from tlt.engine.native.layer_forward import LayerBuffers, LayerForward
from tlt.engine.native.policy_weights import PolicyWeights
from tlt.models.decoder_spec import DecoderConfig
from tlt.models.rope import rotary_table


class PrefillChunk(NamedTuple):
    """Consecutive tokens of one row; what comes before them is cached."""

    row: int
    first: int
    tokens: Sequence[int]


class PolicyForward:
    def __init__(
        self,
        config: DecoderConfig,
        weights: PolicyWeights,
        cache: KvCache,
        states: CapturedStates,
        positions: int,
        most_tokens: int,
        most_decoded: int,
    ) -> None:
        """No pass is over more than `most_tokens`, or makes logits of more than `most_decoded`."""
        self._config = config
        self._weights = weights
        self._cache = cache
        self._states = states
        dtype, device = weights.embedding.dtype, weights.embedding.device
        self._attention = KvCacheAttention(config, cache, positions, dtype)
        self._buffers = LayerBuffers(config, most_tokens, dtype, device)
        wide = self._buffers.wide
        self._logits = torch.empty(most_decoded, config.vocabulary, dtype=wide, device=device)
        self._rope = rotary_table(config.rope, config.head_dim, positions, device).to(
            wide.to_complex()
        )
        self._range = torch.arange(max(positions, most_tokens), device=device)

    @property
    def bytes(self) -> int:
        parts = (self._logits, self._rope, self._range)
        return self._buffers.bytes + self._attention.bytes + sum(part.nbytes for part in parts)

    def decode(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        segments: Callable[[], Sequence[Segment]],
    ) -> torch.Tensor:
        """Logits [rows, window, vocabulary] after a window of tokens in each of the first rows.

        They last until the next ones are made.
        """
        rows, window = tokens.shape
        scratch = self._scratch(tokens.view(-1), positions.view(-1))
        reads = self._attention.windows(scratch.queries, positions, segments)
        which = self._range[:rows].repeat_interleave(window) if window > 1 else self._range[:rows]
        places = self._run(scratch, which, positions.view(-1), reads)
        normed = self._final_norm(scratch.x)
        self._states.keep(self._config.layers, places, normed)
        return self._read_out(normed).view(rows, window, -1)

    def prefill(self, pieces: Sequence[PrefillChunk]) -> None:
        """Cache these tokens, which nothing is drawn from."""
        device = self._range.device
        tokens = torch.tensor([token for piece in pieces for token in piece.tokens], device=device)
        stretches = [RowSpan(piece.row, piece.first, len(piece.tokens)) for piece in pieces]
        rows, positions = self._attention.places(stretches)
        scratch = self._scratch(tokens, positions)
        reads = self._attention.stretches(scratch.queries, stretches)
        places = self._run(scratch, rows, positions, reads)
        if self._states.wants(self._config.layers):
            self._states.keep(self._config.layers, places, self._final_norm(scratch.x))

    def _run(
        self,
        scratch: LayerForward,
        rows: torch.Tensor,
        positions: torch.Tensor,
        reads: PassAttention | SpanAttention,
    ) -> torch.Tensor:
        """Through all layers; where the states of these positions are kept."""
        addresses = self._cache.addresses(rows, positions)
        places = self._states.places(rows, positions)
        for index, layer in enumerate(self._weights.layers):
            self._states.keep(index, places, scratch.x)
            entries = scratch.project(scratch.normalised(), layer)
            self._cache.layers[index].index_copy_(0, addresses, entries)
            scratch.absorb(layer, reads.attended(index))
        return places

    def _scratch(self, tokens: torch.Tensor, positions: torch.Tensor) -> LayerForward:
        scratch = LayerForward(self._config, self._buffers, self._rope.index_select(0, positions))
        torch.index_select(self._weights.embedding, 0, tokens, out=scratch.x)
        return scratch

    def _read_out(self, normed: torch.Tensor) -> torch.Tensor:
        head, logits = self._weights.head, self._logits[: len(normed)]
        if head.dtype == logits.dtype:
            return torch.mm(normed, head.t(), out=logits)
        return logits.copy_(F.linear(normed, head))

    def _final_norm(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (self._config.hidden,), self._weights.norm, self._config.norm_eps)
