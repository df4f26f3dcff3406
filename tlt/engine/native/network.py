"""The policy's forward pass over cached rows: writes each position's entries, then attends.

A position is written before anything attends to it, so what an ended row or a padded prompt left
behind is never seen.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from tlt.engine.native.cache import Cache
from tlt.engine.native.scratch import Scratch
from tlt.engine.native.segments import Segment
from tlt.engine.native.weights import Layer, Weights
from tlt.models.llama import LlamaConfig


class Network:
    def __init__(self, config: LlamaConfig, weights: Weights, cache: Cache, positions: int) -> None:
        self._config = config
        self._weights = weights
        self._cache = cache
        self._heads, self._kv, self._dim = config.heads, config.kv_heads, config.head_dim
        self._grouped = config.heads // config.kv_heads
        self._scale = config.head_dim**-0.5
        self._dtype, device = weights.embedding.dtype, weights.embedding.device
        # half formats have no complex numbers: rope and norms run in float32 there
        self._wide = torch.promote_types(self._dtype, torch.float32)
        self._floor = torch.tensor(
            (config.hidden * config.norm_eps) ** 0.5, dtype=self._wide, device=device
        )
        self._rope = _rope(config, positions, device).to(self._wide.to_complex())
        self._range = torch.arange(positions, device=device)

    def decode(
        self, tokens: torch.Tensor, positions: torch.Tensor, segments: Sequence[Segment]
    ) -> torch.Tensor:
        """Logits after one token in each of the first rows."""
        x = self._weights.embedding.index_select(0, tokens)
        rows = torch.arange(len(tokens), device=x.device)
        scratch = self._scratch(positions)
        addresses = self._cache.addresses(rows, positions)
        reads = [self._read(segment, scratch.queries, positions) for segment in segments]
        for index, (layer, cached) in enumerate(
            zip(self._weights.layers, self._cache.layers, strict=True)
        ):
            self._project(scratch, layer, x)
            cached.index_copy_(0, addresses, scratch.entries.reshape(-1, self._dim))
            attended = [
                F.scaled_dot_product_attention(
                    queries, keys[index], values[index], attn_mask=mask, scale=self._scale
                ).transpose(1, 2)
                for queries, keys, values, mask in reads
            ]
            self._absorb(scratch, layer, x, attended[0] if len(reads) == 1 else torch.cat(attended))
        return self._logits(x)

    def prefill(self, prompts: torch.Tensor, rows: torch.Tensor) -> None:
        """Cache whole prompts [prompts, length], each in its row; padding does no harm."""
        count, length = prompts.shape
        positions = self._range[:length].repeat(count)
        x = self._weights.embedding.index_select(0, prompts.reshape(-1))
        scratch = self._scratch(positions)
        heads = scratch.heads.view(count, length, -1, self._dim).transpose(1, 2)
        queries, keys, values = heads.split([self._heads, self._kv, self._kv], dim=1)
        addresses = self._cache.addresses(rows.repeat_interleave(length), positions)
        for layer, cached in zip(self._weights.layers, self._cache.layers, strict=True):
            self._project(scratch, layer, x)
            cached.index_copy_(0, addresses, scratch.entries.reshape(-1, self._dim))
            attended = F.scaled_dot_product_attention(
                queries,
                keys.repeat(1, self._grouped, 1, 1),
                values.repeat(1, self._grouped, 1, 1),
                is_causal=True,
                scale=self._scale,
            )
            self._absorb(scratch, layer, x, attended.transpose(1, 2))

    def _project(self, scratch: Scratch, layer: Layer, x: torch.Tensor) -> None:
        """Queries, keys and values, the first two turned to their positions."""
        self._normalise(x, scratch.normed)
        torch.mm(scratch.normed, layer.qkv, out=scratch.qkv)
        scratch.rotate()

    def _absorb(
        self, scratch: Scratch, layer: Layer, x: torch.Tensor, attended: torch.Tensor
    ) -> None:
        """What attention found, then the feed-forward part, are added to x."""
        x.addmm_(attended.reshape(-1, self._heads * self._dim), layer.out)
        self._normalise(x, scratch.normed)
        torch.mm(scratch.normed, layer.gate_up, out=scratch.gate_up)
        gated = F.silu(scratch.gate, inplace=True).mul_(scratch.up)
        x.addmm_(gated, layer.down)

    def _normalise(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """RMSNorm without its constant factors, which the weights hold: x / sqrt(|x|² + floor²)."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=self._wide)
        torch.div(x, length.hypot_(self._floor), out=out)

    def _scratch(self, positions: torch.Tensor) -> Scratch:
        turn = self._rope.index_select(0, positions)
        still = torch.ones_like(turn).repeat(1, self._kv)
        turn = torch.cat([turn.repeat(1, self._heads + self._kv), still], dim=1)
        return Scratch(self._config, len(positions), turn, self._weights.embedding)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        weights, config = self._weights, self._config
        normed = F.rms_norm(x, (config.hidden,), weights.norm, config.norm_eps)
        return F.linear(normed, weights.head).to(self._wide)

    def _read(
        self, segment: Segment, queries: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor], Sequence[torch.Tensor], torch.Tensor | None]:
        """What a segment's rows attend with and to: queries; per layer keys and values; a mask."""
        rows = slice(segment.first, segment.last)
        count = segment.last - segment.first
        own = queries[rows].view(count, self._grouped, self._kv, self._dim).transpose(1, 2)
        keys, values = self._cache.views(rows, segment.width)
        if segment.level:
            return own, keys, values, None
        unseen = self._range[: segment.width] > positions[rows, None]
        mask = torch.zeros(unseen.shape, dtype=self._dtype, device=unseen.device)
        mask = mask.masked_fill_(unseen, float("-inf"))[:, None, None]
        return own, keys, values, mask.expand(-1, 1, self._grouped, -1)


def _rope(config: LlamaConfig, positions: int, device: torch.device) -> torch.Tensor:
    """[positions, head_dim / 2] unit numbers, from angles in float32 as Transformers has them."""
    exponents = torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    angles = torch.outer(torch.arange(positions, device=device).float(), frequencies)
    return torch.polar(torch.ones_like(angles), angles)
