"""The intermediate results of one forward pass: every layer overwrites what the last one left.

The buffers are allocated once, for the largest pass; a smaller one uses their first rows.
"""

import torch

from tlt.models.decoder import DecoderConfig


class Buffers:
    def __init__(
        self, config: DecoderConfig, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        def buffer(width: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(tokens, width, dtype=kind, device=device)

        # half formats have no complex numbers: rope and norms run in float32 there
        self.wide = torch.promote_types(dtype, torch.float32)
        turned = config.heads + config.kv_heads
        self.x = buffer(config.hidden)
        self.normed = buffer(config.hidden)
        self.length = buffer(1, self.wide)
        self.qkv = buffer((turned + config.kv_heads) * config.head_dim)
        self.turn = buffer(turned * config.head_dim // 2, self.wide.to_complex())
        self.gate_up = buffer(2 * config.intermediate)

    @property
    def bytes(self) -> int:
        return sum(
            b.nbytes for b in (self.x, self.normed, self.length, self.qkv, self.turn, self.gate_up)
        )


class Scratch:
    """Views of the buffers for one pass over some tokens."""

    def __init__(self, config: DecoderConfig, buffers: Buffers, turn: torch.Tensor) -> None:
        """`turn` [tokens, pairs of a head] rotates each query and key."""
        tokens, turned = len(turn), config.heads + config.kv_heads
        self.x = buffers.x[:tokens]
        self.normed = buffers.normed[:tokens]
        self.length = buffers.length[:tokens]
        self.qkv = buffers.qkv[:tokens]
        self.heads = self.qkv.view(tokens, -1, config.head_dim)
        self.turned = self.heads[:, :turned]
        self.queries = self.heads[:, : config.heads]
        self.entries = self.heads[:, config.heads :]
        self.gate_up = buffers.gate_up[:tokens]
        self.gate, self.up = self.gate_up.chunk(2, dim=1)
        self._wide = buffers.wide
        self._turn = buffers.turn[:tokens].view(tokens, turned, -1)
        self._turn.copy_(turn[:, None])
        half = self.qkv.dtype.itemsize < self._wide.itemsize
        self._pairs = None if half else self.turned.view(self._turn.dtype)

    def rotate(self) -> None:
        if self._pairs is not None:
            self._pairs.mul_(self._turn)
        else:
            pairs = self.turned.to(self._wide).view(self._turn.dtype)
            self.turned.copy_(pairs.mul_(self._turn).view(self._wide))
