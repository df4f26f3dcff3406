"""The policy's weights and forward pass over cached rows: write each position, then attend.

A position is written before anything attends to it, so the leftovers of an ended row or of a
rejected draft are never read.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tlt.engine.native.decode_attention_kernels import PassAttention
from tlt.engine.native.few_row_products import multiply_by_head
from tlt.engine.native.fused_layer_weights import Layer, LayerFiller, new_layer
from tlt.engine.native.kv_cache_attention import KvCacheAttention, RowSpan
from tlt.engine.native.layer_forward import LayerBuffers, LayerForward
from tlt.engine.native.rows_by_length import Segment
from tlt.engine.native.slot_storage import SlotTensors
from tlt.models.decoder_spec import EMBEDDING, FINAL_NORM, HEAD, DecoderConfig


class PolicyWeights:
    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        def buffer(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        self.config = config
        hidden = config.hidden
        self.layers = [new_layer(config, hidden, dtype, device) for _ in range(config.layers)]
        self.embedding = buffer(config.vocabulary, hidden)
        self.norm = buffer(hidden)
        self.head = self.embedding if config.tied else buffer(config.vocabulary, hidden)

    @property
    def is_exact(self) -> bool:
        """Return True if rounding is too small to change what is sampled, but for exact ties."""
        return self.embedding.device.type == "cpu" and self.embedding.dtype.itemsize >= 4

    @torch.inference_mode()
    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        for index, layer in enumerate(self.layers):
            self._load_layer(layer, weights, f"model.layers.{index}.")
        self.embedding.copy_(weights[EMBEDDING])
        self.norm.copy_(weights[FINAL_NORM])
        if not self.config.tied:
            self.head.copy_(weights[HEAD])

    def _load_layer(self, layer: Layer, weights: Mapping[str, torch.Tensor], prefix: str) -> None:
        device = self.embedding.device
        # wide, so that products of weights are rounded only once, when they are stored
        wide = torch.promote_types(self.embedding.dtype, torch.float32)

        def weight(name: str) -> torch.Tensor:
            return weights[prefix + name].to(device, wide)

        entrance = weight("input_layernorm.weight") * self.config.hidden**0.5
        LayerFiller(self.config, layer, weight).fill(entrance)


class PrefillChunk(NamedTuple):
    """Consecutive tokens of one row; those before them are cached."""

    row: int
    first: int
    tokens: Sequence[int]


class PolicyForward:
    def __init__(
        self, weights: PolicyWeights, slots: SlotTensors, most_tokens: int, most_decoded: int
    ) -> None:
        """Allocate for passes over up to `most_tokens`, and logits of up to `most_decoded`."""
        self._config = config = weights.config
        self._weights = weights
        self._slots = slots
        self._cache = slots.cache
        self._states = slots.states
        dtype, device = weights.embedding.dtype, weights.embedding.device
        self._attention = KvCacheAttention(config, slots.cache)
        self._buffers = LayerBuffers(config, most_tokens, slots.positions, dtype, device)
        wide = self._buffers.wide
        self._logits = torch.empty(most_decoded, config.vocabulary, dtype=wide, device=device)
        self._range = torch.arange(max(slots.positions, most_tokens), device=device)

    @property
    def bytes(self) -> int:
        own = self._logits.nbytes + self._range.nbytes
        return self._buffers.bytes + self._attention.bytes + own

    def decode(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        segments: Callable[[], Sequence[Segment]],
    ) -> torch.Tensor:
        """Return logits [rows, window, vocabulary] after a window of tokens in the first rows.

        The next call overwrites them.
        """
        rows, window = tokens.shape
        layer = self._begin(tokens.view(-1), positions.view(-1))
        attention = self._attention.window_attention(layer.queries, positions, segments)
        which = self._range[:rows].repeat_interleave(window) if window > 1 else self._range[:rows]
        indices = self._run(layer, which, positions.view(-1), attention)
        normed = self._final_norm(layer.x)
        self._states.keep(self._config.layers, indices, normed)
        return self._compute_logits(normed).view(rows, window, -1)

    def prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        """Cache these tokens without sampling."""
        device = self._range.device
        tokens = torch.tensor([token for chunk in chunks for token in chunk.tokens], device=device)
        spans = [RowSpan(chunk.row, chunk.first, len(chunk.tokens)) for chunk in chunks]
        rows, positions = self._attention.span_positions(spans)
        layer = self._begin(tokens, positions)
        attention = self._attention.span_attention(layer.queries, spans)
        indices = self._run(layer, rows, positions, attention)
        self._states.keep_computed(self._config.layers, indices, lambda: self._final_norm(layer.x))

    def _run(
        self,
        layer: LayerForward,
        rows: torch.Tensor,
        positions: torch.Tensor,
        attention: PassAttention,
    ) -> torch.Tensor:
        """Compute all layers; return the flat indices of these positions."""
        addresses = self._cache.addresses(rows, positions)
        indices = self._slots.flat_indices(rows, positions)
        for index, weights in enumerate(self._weights.layers):
            self._states.keep(index, indices, layer.x)
            layer.project(layer.normalised(), weights)
            layer.cache_entries(self._cache.layers[index], addresses)
            layer.absorb(weights, attention.attend(index))
        return indices

    def _begin(self, tokens: torch.Tensor, positions: torch.Tensor) -> LayerForward:
        layer = self._buffers.begin(positions)
        torch.index_select(self._weights.embedding, 0, tokens, out=layer.x)
        return layer

    def _compute_logits(self, normed: torch.Tensor) -> torch.Tensor:
        return multiply_by_head(normed, self._weights.head, self._logits[: len(normed)])

    def _final_norm(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (self._config.hidden,), self._weights.norm, self._config.norm_eps)
