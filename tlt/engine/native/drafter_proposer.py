"""A drafter proposes chains for the running rows; what it needs of their past it makes when asked.

Its cache holds, for the first positions of each row, what follows from the policy's own states.
Positions that lack, because the row is new, the drafter is, or others decoded meanwhile, are made
before the first proposal; those it guessed its way through are made again from the truth.
"""

from collections.abc import Sequence
from functools import partial

import torch

from tlt.engine.native.decode_attention_kernels import PassAttention
from tlt.engine.native.drafter_weights import DrafterWeights
from tlt.engine.native.kv_cache import KvCache
from tlt.engine.native.kv_cache_attention import KvCacheAttention, RowSpan, SpanAttention
from tlt.engine.native.layer_forward import LayerBuffers, LayerForward
from tlt.engine.native.policy_weights import PolicyWeights
from tlt.engine.native.prompt_prefill import CHUNK
from tlt.engine.native.running_batch import RunningBatch
from tlt.engine.native.slot_tensors import SlotTensors
from tlt.models.eagle_drafter import Drafter
from tlt.models.rope import rotary_table

# A row that lacks more positions than this is filled up by itself: the others would wait for it,
# as all rows of a window are as wide as the widest.
_NARROW = 16


class DrafterProposer:
    def __init__(
        self,
        drafter: Drafter,
        policy: PolicyWeights,
        slots: SlotTensors,
        rows: int,
        longest_draft: int,
    ) -> None:
        """For the first `rows` slots, in chains of up to `longest`."""
        dtype, device = policy.embedding.dtype, policy.embedding.device
        self._weights = DrafterWeights(drafter, policy.head, dtype, device)
        self._policy = policy
        self._slots = slots
        shape, positions = self._weights.shape, slots.positions
        self._cache = KvCache(shape, rows, positions, dtype, device)
        self._attention = KvCacheAttention(shape, self._cache, positions, dtype)
        self._buffers = LayerBuffers(
            shape, max(rows * max(longest_draft + 1, _NARROW), CHUNK), dtype, device
        )
        turns = rotary_table(shape.rope, shape.head_dim, positions, device)
        self._rope = turns.to(self._buffers.wide.to_complex())
        self._columns = slots.states.columns(drafter.config.captured)
        self._range = torch.arange(max(rows, positions), device=device)

    @property
    def bytes(self) -> int:
        parts = (self._cache, self._attention, self._buffers, self._weights)
        return sum(part.bytes for part in parts) + self._rope.nbytes + self._range.nbytes

    def copy(self, source: int, target: int, positions: int) -> None:
        self._cache.copy(source, target, positions)

    def propose(self, batch: RunningBatch, depth: int, noise: torch.Tensor | None) -> torch.Tensor:
        """Chains [rows, depth] for what follows each row's newest token.

        Drawn with this noise [rows, depth or more, vocabulary], or its best guesses without.
        """
        self._fill_up(batch)
        x = self._catch_up(batch)
        drafts = [self._guess(batch, x, noise, 0)]
        for ahead in range(1, depth):
            positions = batch.positions[:, None] + (ahead - 1)
            x = self._pass(batch, drafts[-1], x, positions, ahead)
            drafts.append(self._guess(batch, x, noise, ahead))
        return torch.cat(drafts, dim=1)

    def _guess(
        self, batch: RunningBatch, x: torch.Tensor, noise: torch.Tensor | None, ahead: int
    ) -> torch.Tensor:
        logits = self._weights.logits(x).to(self._buffers.wide)[:, None]
        own = None if noise is None else noise[:, ahead : ahead + 1]
        if self._weights.tokens is None:
            return batch.sampler.guess(logits, own)
        if own is not None:
            own = own.index_select(-1, self._weights.tokens)
        return self._weights.tokens[batch.sampler.guess(logits, own)]

    def _fill_up(self, batch: RunningBatch) -> None:
        """Rows that lack much get it, in passes of a bounded size."""
        lacking = [
            RowSpan(index, row.drafted, place - row.drafted)
            for index, (row, place) in enumerate(zip(batch.rows, batch.places, strict=True))
            if place - row.drafted > _NARROW
        ]
        for stretches in _chunks(lacking):
            rows, positions = self._attention.places(stretches)
            scratch, inputs = self._enter(*self._known(rows, positions), positions)
            reads = self._attention.stretches(scratch.queries, stretches)
            self._run(scratch, inputs, rows, positions, reads)
            for stretch in stretches:
                batch.rows[stretch.row].drafted = stretch.first + stretch.length

    def _catch_up(self, batch: RunningBatch) -> torch.Tensor:
        """What the policy's last states make of each row's newest token: [rows, hidden]."""
        lacking = (p - row.drafted for p, row in zip(batch.places, batch.rows, strict=True))
        window = max(1, *lacking)
        last = batch.positions[:, None]
        # A row's first token has nothing before it. What is guessed then means nothing.
        positions = (last - window + self._range[:window]).clamp_(min=0)
        rows = self._rows(len(batch.rows), window)
        tokens, features = self._known(rows, positions.view(-1))
        x = self._window(batch, rows, tokens, features, positions, 0)
        for row, place in zip(batch.rows, batch.places, strict=True):
            row.drafted = place
        return x.view(len(batch.rows), window, -1)[:, -1].contiguous()

    def _pass(
        self,
        batch: RunningBatch,
        tokens: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        ahead: int,
    ) -> torch.Tensor:
        rows = self._range[: len(batch.rows)]
        return self._window(batch, rows, tokens.view(-1), features, positions, ahead)

    def _window(
        self,
        batch: RunningBatch,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        ahead: int,
    ) -> torch.Tensor:
        scratch, inputs = self._enter(tokens, features, positions.view(-1))
        segments = partial(batch.segments, ahead)
        reads = self._attention.windows(scratch.queries, positions, segments)
        return self._run(scratch, inputs, rows, positions.view(-1), reads)

    def _known(
        self, rows: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What follows these positions, and what the policy knew there."""
        slots = self._slots
        places = slots.places(rows, positions)
        tokens = slots.tokens.view(-1).index_select(0, places + 1)
        states = slots.states.at(places, self._columns)
        if self._weights.config.layout == "eagle":
            return tokens, states.flatten(1)
        return tokens, states.flatten(1) @ self._weights.fc.matrix

    def _enter(
        self, tokens: torch.Tensor, features: torch.Tensor, positions: torch.Tensor
    ) -> tuple[LayerForward, torch.Tensor]:
        """A pass, and what its queries, keys and values are made of."""
        turn = self._rope.index_select(0, positions)
        scratch = LayerForward(self._weights.shape, self._buffers, turn)
        embedded = self._policy.embedding.index_select(0, tokens)
        if self._weights.config.layout == "eagle":
            fc = self._weights.fc
            assert fc.bias is not None
            merged = torch.cat([embedded, features], dim=1)
            torch.addmm(fc.bias, merged, fc.matrix, out=scratch.x)
            return scratch, scratch.x
        scratch.x.copy_(features)
        both = torch.stack([embedded, features], dim=1)
        length = torch.linalg.vector_norm(both, dim=-1, keepdim=True, dtype=self._buffers.wide)
        return scratch, (both / length.hypot_(self._buffers.floor)).to(both.dtype).flatten(1)

    def _run(
        self,
        scratch: LayerForward,
        inputs: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        reads: PassAttention | SpanAttention,
    ) -> torch.Tensor:
        layer = self._weights.layer
        entries = scratch.project(inputs, layer)
        self._cache.layers[0].index_copy_(0, self._cache.addresses(rows, positions), entries)
        scratch.absorb(layer, reads.attended(0))
        return scratch.x

    def _rows(self, rows: int, window: int) -> torch.Tensor:
        return self._range[:rows].repeat_interleave(window)


def _chunks(stretches: Sequence[RowSpan]) -> list[list[RowSpan]]:
    """Of at most CHUNK positions each, cut where necessary."""
    chunks: list[list[RowSpan]] = [[]]
    room = CHUNK
    for row, first, length in stretches:
        while length:
            if room == 0:
                chunks.append([])
                room = CHUNK
            taken = min(length, room)
            chunks[-1].append(RowSpan(row, first, taken))
            first, length, room = first + taken, length - taken, room - taken
    return [chunk for chunk in chunks if chunk]
