"""Propose chains for the running rows with a drafter, whose cache is filled on demand.

The cache holds, for the first positions of each row, keys and values made from the policy's own
states. Missing positions (of a new row or drafter, or after steps of other strategies) are computed
before the first proposal. Positions that were proposed are computed again from the true tokens.
"""

from collections.abc import Sequence
from functools import partial

import torch

from tlt.engine.native.decode_attention_kernels import PassAttention
from tlt.engine.native.few_row_products import find_products
from tlt.engine.native.fused_drafter_weights import DrafterWeights
from tlt.engine.native.kv_cache import KvCache
from tlt.engine.native.kv_cache_attention import KvCacheAttention, RowSpan
from tlt.engine.native.layer_forward import LayerBuffers, LayerForward
from tlt.engine.native.policy_forward import PolicyWeights
from tlt.engine.native.prompt_prefill import CHUNK
from tlt.engine.native.running_batch_tensors import Row, RunningBatch
from tlt.engine.native.slot_storage import SlotTensors
from tlt.models.eagle_drafter import Drafter

# A row that misses more positions is filled alone, because all rows of a window are padded to the
# widest.
_NARROW = 16


class DrafterProposer:
    def __init__(
        self, drafter: Drafter, policy: PolicyWeights, slots: SlotTensors, rows: int, depth: int
    ) -> None:
        """Propose for the first `rows` slots, in chains of up to `depth`."""
        dtype, device = policy.embedding.dtype, policy.embedding.device
        self._weights = DrafterWeights(drafter, policy.head, dtype, device)
        self._policy = policy
        self._slots = slots
        shape, positions = self._weights.shape, slots.positions
        self._cache = KvCache(shape, rows, positions, dtype, device)
        self._attention = KvCacheAttention(shape, self._cache)
        tokens = max(rows * max(depth + 1, _NARROW), CHUNK)
        self._buffers = LayerBuffers(shape, tokens, positions, dtype, device)
        self._columns = slots.states.columns(drafter.config.captured)
        self._range = torch.arange(max(rows, positions), device=device)
        # by request: how many positions the cache holds
        self._cached: dict[int, int] = {}

    @property
    def bytes(self) -> int:
        parts = (self._cache, self._attention, self._buffers, self._weights)
        return sum(part.bytes for part in parts) + self._range.nbytes

    def release_memory(self) -> None:
        """Free the cache until `restore_memory`; no row runs meanwhile."""
        self._cache.release()
        self._cached.clear()

    def restore_memory(self) -> None:
        self._cache.restore()

    def handle_weight_swap(self) -> None:
        self._weights.update_head()

    def handle_row_move(self, row: Row, source: int, target: int) -> None:
        self._cache.copy(source, target, self._cached_positions(row))

    def handle_row_end(self, row: Row) -> None:
        self._cached.pop(row.request.id, None)

    def propose(self, batch: RunningBatch, depth: int, noise: torch.Tensor | None) -> torch.Tensor:
        """Return chains [rows, depth] that follow each row's newest token.

        They are sampled with this noise [rows, depth or more, vocabulary], or greedy without.
        """
        self._fill_up(batch)
        x = self._catch_up(batch)
        drafts = [self._sample(batch, x, noise, 0)]
        rows = self._range[: len(batch.rows)]
        for ahead in range(1, depth):
            positions = batch.positions[:, None] + (ahead - 1)
            x = self._decode(batch, rows, drafts[-1].view(-1), x, positions, ahead)
            drafts.append(self._sample(batch, x, noise, ahead))
        return torch.cat(drafts, dim=1)

    def _sample(
        self, batch: RunningBatch, x: torch.Tensor, noise: torch.Tensor | None, ahead: int
    ) -> torch.Tensor:
        logits = self._weights.logits(x)[:, None]
        own = None if noise is None else noise[:, ahead : ahead + 1]
        if self._weights.tokens is None:
            return batch.sampler.sample_drafts(logits, own)
        if own is not None:
            own = own.index_select(-1, self._weights.tokens)
        return self._weights.tokens[batch.sampler.sample_drafts(logits, own)]

    def _fill_up(self, batch: RunningBatch) -> None:
        """Cache the positions of rows that miss many, in passes of a bounded size."""
        missing: list[RowSpan] = []
        for index, (row, position) in enumerate(zip(batch.rows, batch.last_positions, strict=True)):
            cached = self._cached_positions(row)
            if position - cached > _NARROW:
                missing.append(RowSpan(index, cached, position - cached))
        for spans in _chunks(missing):
            rows, positions = self._attention.span_positions(spans)
            layer, inputs = self._enter(*self._features(rows, positions), positions)
            attention = self._attention.span_attention(layer.queries, spans)
            self._run(layer, inputs, rows, positions, attention)
            for span in spans:
                self._cached[batch.rows[span.row].request.id] = span.first + span.length

    def _catch_up(self, batch: RunningBatch) -> torch.Tensor:
        """Cache what is still missing, and return the output at each row's last fed position."""
        positions_by_row = list(zip(batch.rows, batch.last_positions, strict=True))
        window = max(1, *(p - self._cached_positions(row) for row, p in positions_by_row))
        last = batch.positions[:, None]
        # a row's first token has no state before it, so its draft is meaningless
        positions = (last - window + self._range[:window]).clamp_(min=0)
        rows = self._range[: len(batch.rows)].repeat_interleave(window)
        tokens, features = self._features(rows, positions.view(-1))
        x = self._decode(batch, rows, tokens, features, positions, 0)
        for row, position in positions_by_row:
            self._cached[row.request.id] = position
        return x.view(len(batch.rows), window, -1)[:, -1].contiguous()

    def _decode(
        self,
        batch: RunningBatch,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        ahead: int,
    ) -> torch.Tensor:
        layer, inputs = self._enter(tokens, features, positions.view(-1))
        segments = partial(batch.segments, ahead)
        attention = self._attention.window_attention(layer.queries, positions, segments)
        return self._run(layer, inputs, rows, positions.view(-1), attention)

    def _features(
        self, rows: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens that follow these positions, and features of the policy's states."""
        slots = self._slots
        indices = slots.flat_indices(rows, positions)
        tokens = slots.tokens.view(-1).index_select(0, indices + 1)
        states = slots.states.at(indices, self._columns)
        if self._weights.config.layout == "eagle":
            return tokens, states.flatten(1)
        features = states.new_empty(len(states), self._weights.config.hidden)
        find_products(len(states), states).multiply(states.flatten(1), *self._weights.fc, features)
        return tokens, features

    def _enter(
        self, tokens: torch.Tensor, features: torch.Tensor, positions: torch.Tensor
    ) -> tuple[LayerForward, torch.Tensor]:
        """Begin a pass, and return the input of its queries, keys and values."""
        layer = self._buffers.begin(positions)
        embedded = self._policy.embedding.index_select(0, tokens)
        if self._weights.config.layout == "eagle":
            fc = self._weights.fc
            merged = torch.cat([embedded, features], dim=1)
            layer.products.multiply(merged, *fc, layer.x)
            return layer, layer.x
        layer.x.copy_(features)
        both = torch.stack([embedded, features], dim=1)
        length = torch.linalg.vector_norm(both, dim=-1, keepdim=True, dtype=self._buffers.wide)
        return layer, (both / length.hypot_(self._buffers.floor)).to(both.dtype).flatten(1)

    def _run(
        self,
        layer: LayerForward,
        inputs: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        attention: PassAttention,
    ) -> torch.Tensor:
        layer.project(inputs, self._weights.layer)
        layer.cache_entries(self._cache.layers[0], self._cache.addresses(rows, positions))
        layer.absorb(self._weights.layer, attention.attend(0))
        return layer.x

    def _cached_positions(self, row: Row) -> int:
        return self._cached.get(row.request.id, 0)


def _chunks(spans: Sequence[RowSpan]) -> list[list[RowSpan]]:
    """Group spans into chunks of at most CHUNK positions, cutting them where necessary."""
    chunks: list[list[RowSpan]] = [[]]
    room = CHUNK
    for row, first, length in spans:
        while length:
            if room == 0:
                chunks.append([])
                room = CHUNK
            size = min(length, room)
            chunks[-1].append(RowSpan(row, first, size))
            first, length, room = first + size, length - size, room - size
    return [chunk for chunk in chunks if chunk]
