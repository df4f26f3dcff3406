"""The intermediate results of one forward pass: every layer overwrites what the last one left."""

import torch

from tlt.models.llama import LlamaConfig


class Scratch:
    def __init__(self, config: LlamaConfig, tokens: int, turn: torch.Tensor, like: torch.Tensor):
        """`turn` [tokens, pairs] rotates each pair of queries, keys and (by nothing) values."""
        self.normed = like.new_empty(tokens, config.hidden)
        self.qkv = like.new_empty(tokens, 2 * turn.shape[1])
        self.heads = self.qkv.view(tokens, -1, config.head_dim)
        self.queries = self.heads[:, : config.heads]
        self.entries = self.heads[:, config.heads :]
        self.gate_up = like.new_empty(tokens, 2 * config.intermediate)
        self.gate, self.up = self.gate_up.chunk(2, dim=1)
        self._turn = turn
        # a half format's numbers cannot be viewed as complex ones
        half = 2 * like.dtype.itemsize != turn.dtype.itemsize
        self._pairs = None if half else self.qkv.view(turn.dtype)

    def rotate(self) -> None:
        if self._pairs is not None:
            self._pairs.mul_(self._turn)
        else:
            pairs = self.qkv.to(self._turn.real.dtype).view(self._turn.dtype)
            self.qkv.copy_(pairs.mul_(self._turn).view(self._turn.real.dtype))
