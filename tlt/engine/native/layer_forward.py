"""Compute a decoder layer in place, in buffers that all layers of a model share.

The buffers are allocated once, for the largest pass; a smaller one uses their first rows. Every
layer overwrites what the previous one left.
"""

import torch
import torch.nn.functional as F

from tlt.engine.native.few_row_products import find_products
from tlt.engine.native.fused_layer_weights import Layer
from tlt.engine.native.layer_kernel import LayerKernel, find_kernel
from tlt.models.decoder_spec import DecoderConfig
from tlt.models.rope import rotary_table


class LayerBuffers:
    def __init__(
        self,
        config: DecoderConfig,
        tokens: int,
        positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate for passes over up to `tokens` tokens at up to `positions` positions."""

        def buffer(width: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(tokens, width, dtype=kind, device=device)

        def floor(width: int) -> torch.Tensor:
            return torch.tensor((width * config.norm_eps) ** 0.5, dtype=self.wide, device=device)

        self.config = config
        # half formats have no complex numbers: rope and norms run in float32 there
        self.wide = torch.promote_types(dtype, torch.float32)
        self.floor, self.head_floor = floor(config.hidden), floor(config.head_dim)
        turned = config.heads + config.kv_heads
        self.x = buffer(config.hidden)
        self.normed = buffer(config.hidden)
        self.length = buffer(1, self.wide)
        self.qkv = buffer((turned + config.kv_heads) * config.head_dim)
        self.gate_up = buffer(2 * config.intermediate)
        turns = rotary_table(config.rope, config.head_dim, positions, device)
        self._turns = turns.to(self.wide.to_complex())
        self._kernel = find_kernel(self.x)

    @property
    def bytes(self) -> int:
        parts = (self.x, self.normed, self.length, self.qkv, self.gate_up, self._turns)
        return sum(part.nbytes for part in parts)

    def begin(self, positions: torch.Tensor) -> "LayerForward":
        """Begin a pass over tokens at these positions."""
        turns = self._turns.index_select(0, positions)
        if self._kernel is not None:
            return CompiledLayerForward(self, turns, self._kernel)
        return LayerForward(self, turns)


class LayerForward:
    """Views of the buffers for one pass over some tokens."""

    def __init__(self, buffers: LayerBuffers, turns: torch.Tensor) -> None:
        """Rotate each query and key by `turns` [tokens, pairs of a head]."""
        config = buffers.config
        tokens, turned = len(turns), config.heads + config.kv_heads
        self.products = find_products(tokens, buffers.x)
        self.x = buffers.x[:tokens]
        self.normed = buffers.normed[:tokens]
        self.queries_width = config.heads * config.head_dim
        self._buffers = buffers
        self._length = buffers.length[:tokens]
        self._qkv = buffers.qkv[:tokens]
        heads = self._qkv.view(tokens, -1, config.head_dim)
        self._turned = heads[:, :turned]
        self.queries = heads[:, : config.heads]
        self._entries = heads[:, config.heads :]
        self._gate_up = buffers.gate_up[:tokens]
        self._gate, self._up = self._gate_up.chunk(2, dim=1)
        self._turns = turns

    def project(self, inputs: torch.Tensor, layer: Layer) -> None:
        """Compute queries, keys and values; rope is applied."""
        self.products.multiply(inputs, *layer.qkv, self._qkv)
        if layer.head_norms is not None:
            heads, wide = self._turned, self._buffers.wide
            length = torch.linalg.vector_norm(heads, dim=-1, keepdim=True, dtype=wide)
            floor = self._buffers.head_floor
            torch.div(heads, length.hypot_(floor), out=heads).mul_(layer.head_norms)
        self._rotate()

    def cache_entries(self, cache: torch.Tensor, rows: torch.Tensor) -> None:
        """Write the keys and values of all tokens to these rows [tokens x heads] of the cache."""
        cache.index_copy_(0, rows, self._entries.reshape(-1, self._entries.shape[-1]))

    def absorb(self, layer: Layer, attended: torch.Tensor) -> None:
        """Add the attention's output, then the feed-forward part, to x."""
        self.products.add(attended.reshape(-1, self.queries_width), *layer.out, self.x)
        self.products.multiply(self.normalised(), *layer.gate_up, self._gate_up)
        self.products.add(self._gated(), *layer.down, self.x)

    def normalised(self) -> torch.Tensor:
        """Return x / sqrt(|x|² + floor²): RMSNorm but for the factors that the weights hold."""
        length = self._length
        torch.linalg.vector_norm(self.x, dim=-1, keepdim=True, dtype=length.dtype, out=length)
        return torch.div(self.x, length.hypot_(self._buffers.floor), out=self.normed)

    def _gated(self) -> torch.Tensor:
        return F.silu(self._gate, inplace=True).mul_(self._up)

    def _rotate(self) -> None:
        pairs = self._turned.to(self._buffers.wide).view(self._turns.dtype)
        self._turned.copy_(pairs.mul(self._turns[:, None]).view(self._buffers.wide))


class CompiledLayerForward(LayerForward):
    """The parts between the products are computed in C."""

    def __init__(self, buffers: LayerBuffers, turns: torch.Tensor, kernel: LayerKernel) -> None:
        super().__init__(buffers, turns)
        self._kernel = kernel
        config, tokens = buffers.config, len(turns)
        heads, width = config.heads + config.kv_heads, config.head_dim
        pitch = self._qkv.stride(0)
        addresses = (self.x.data_ptr(), self.normed.data_ptr())
        self._to_normalise = (*addresses, tokens, config.hidden, buffers.floor.item())
        self._to_gate = (self._gate_up.data_ptr(), tokens, config.intermediate)
        self._to_rotate = (self._qkv.data_ptr(), pitch, turns.data_ptr(), tokens, heads, width)
        entries = (self._entries.data_ptr(), pitch, tokens)
        self._to_cache = (*entries, 2 * config.kv_heads, width)

    def cache_entries(self, cache: torch.Tensor, rows: torch.Tensor) -> None:
        self._kernel.cache_entries(*self._to_cache, cache.data_ptr(), rows.data_ptr())

    def normalised(self) -> torch.Tensor:
        self._kernel.normalise(*self._to_normalise)
        return self.normed

    def _gated(self) -> torch.Tensor:
        self._kernel.gate(*self._to_gate)
        return self._gate

    def _rotate(self) -> None:
        self._kernel.rotate(*self._to_rotate)
