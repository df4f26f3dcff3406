"""Causal attention without a kernel of its own: matrix products over blocks of queries.

A block meets only the keys up to its own end, and the heads of a group share one product instead of
repeating their keys. It pays where the fused kernel leaves matrix units idle.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

BLOCKED = "tlt_blocked"
_BLOCK = 128


def blocked(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """batch x heads x tokens x width, as torch's own; keys and values may have fewer heads."""
    batch, heads, tokens, width = query.shape
    shared = key.shape[1]
    grouped = query.to(value.dtype).reshape(batch * shared, heads // shared, tokens, width)
    keys = key.to(value.dtype).reshape(batch * shared, tokens, width).transpose(1, 2)
    values = value.reshape(batch * shared, tokens, width)
    step = -(-tokens // -(-tokens // _BLOCK))
    # Autocast would lift the soft-max to float32 and copy all scores twice.
    with torch.autocast(query.device.type, enabled=False):
        parts = [
            _block(grouped, keys, values, scale, start, min(start + step, tokens))
            for start in range(0, tokens, step)
        ]
    return torch.cat(parts, 2).view(batch, heads, tokens, width)


def _block(
    grouped: Tensor, keys: Tensor, values: Tensor, scale: float, start: int, end: int
) -> Tensor:
    rows, members, _, width = grouped.shape
    size = end - start
    queries = grouped[:, :, start:end].reshape(rows, members * size, width)
    scores = torch.bmm(queries * scale, keys[:, :, :end])
    scores[:, :, start:] += _mask(size, members, scores.dtype, scores.device)
    return torch.bmm(scores.softmax(-1), values[:, :end]).view(rows, members, size, width)


@lru_cache(maxsize=256)
def _mask(size: int, members: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    hidden = torch.full((size, size), -torch.inf, dtype=dtype, device=device)
    return hidden.triu(1).repeat(members, 1)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    scale: float | None = options.get("scaling")
    if attention_mask is not None or scale is None or key.shape[2] != query.shape[2]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return blocked(query, key, value, scale).transpose(1, 2).contiguous(), None


AttentionInterface.register(BLOCKED, _attend)
# Unregistered, a sliding window would silently become full attention.
AttentionMaskInterface.register(BLOCKED, sdpa_mask)
