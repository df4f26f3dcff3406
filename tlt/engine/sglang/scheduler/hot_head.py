"""The head of a drafter that proposes some of the policy's tokens: those rows of the policy's head.

SGLang copies such rows once, at its start, and from one rank's part of the head. Here they are
copied again, in place, whenever the policy or the drafter's tokens change.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

_TOKENS = "d2t"
Weights = Iterable[tuple[str, torch.Tensor]]


class HotHead:
    def __init__(self, draft: Any, policy: Any, group: Any, folder: Path) -> None:
        """Give SGLang's draft worker the tokens of the drafter in `folder`.

        `policy` is SGLang's model; `group` holds the ranks that share it.
        """
        self._policy_head, self._group = policy.lm_head, group
        model = draft.draft_runner.model
        offsets = load_file(folder / "model.safetensors")[_TOKENS]
        like = self._policy_head.weight
        self._counting = torch.arange(len(offsets), device=like.device)
        self._tokens = offsets.to(like.device) + self._counting
        draft.hot_token_id = self._tokens
        if model.lm_head.weight is like:  # EAGLE's, which shares it
            rows = like.new_zeros(len(offsets) // group.world_size, like.shape[1])
            model.lm_head.weight = nn.Parameter(rows, requires_grad=False)
        self._rows = model.lm_head.weight.data
        self._load_drafter, self._load_policy = model.load_weights, policy.load_weights
        model.load_weights, policy.load_weights = self._update_drafter, self._update_policy
        self._copy()

    def _update_drafter(self, weights: Weights) -> Any:
        others: list[tuple[str, torch.Tensor]] = []
        for name, weight in weights:
            if name == _TOKENS:
                self._tokens.copy_(weight.to(self._tokens) + self._counting)
                self._copy()
            else:
                others.append((name, weight))
        return self._load_drafter(others)

    def _update_policy(self, weights: Weights) -> Any:
        loaded = self._load_policy(weights)
        self._copy()
        return loaded

    @torch.no_grad()
    def _copy(self) -> None:
        """Copy this rank's part of the rows, after all ranks gave the rows that they hold."""
        held, shard = self._policy_head.weight, self._policy_head.shard_indices
        first, end = shard.org_vocab_start_index, shard.org_vocab_end_index
        own = (self._tokens >= first) & (self._tokens < end)
        rows = held[(self._tokens - first).clamp(0, len(held) - 1)] * own[:, None]
        begin = self._group.rank_in_group * len(self._rows)
        part = self._group.all_reduce(rows)[begin : begin + len(self._rows)]
        self._rows[: len(part)].copy_(part)
