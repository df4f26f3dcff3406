"""A chain's query meets the policy's positions up to where the chain began, then its own guesses.

Row r of every step belongs to the chain that begins at row r. So what a step sees of step 0 is
plain causal attention, and of the steps since then only its own row.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tlt.interrupt import CheckInterrupt, never_interrupt
from tlt.kernels.training_kernels import TrainingKernels
from tlt.trainer.drafter.interruptible_matmul import look_back, stretch

# What mask and softmax cost a score, in multiplications.
_SCORE = 256


class Pairs(NamedTuple):
    """Keys and values: [shared heads, rows, width]."""

    keys: Tensor
    values: Tensor


def attend(
    queries: Tensor,
    seen: Pairs,
    own: Sequence[Pairs],
    bounds: Tensor,
    before: Pairs | None,
    check: CheckInterrupt = never_interrupt,
) -> Tensor:
    """[heads, rows, width]; `before` are rows ahead of the only sample, seen by all."""
    ends: list[int] = bounds.tolist()
    own_keys = torch.stack([pairs.keys for pairs in own]) if own else None
    own_values = torch.stack([pairs.values for pairs in own]) if own else None
    prefix = 0 if before is None else before.keys.shape[1]
    heads, _, width = queries.shape
    scores = stretch(queries) // (heads * (width + _SCORE))
    parts: list[Tensor] = []
    for first, last in pairwise(ends):
        block = max(1, scores // max(1, prefix + last - first))
        for begin in range(first, last, block):
            rows = slice(begin, min(last, begin + block))
            check()
            part = _one(
                queries[:, rows],
                Pairs(*(tensor[:, first : rows.stop] for tensor in seen)),
                None if own_keys is None else own_keys[:, :, rows],
                None if own_values is None else own_values[:, :, rows],
                before,
            )
            look_back(part, check)
            parts.append(part)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _one(
    queries: Tensor,
    seen: Pairs,
    own_keys: Tensor | None,
    own_values: Tensor | None,
    before: Pairs | None,
) -> Tensor:
    """Rows of a sample, over the keys up to the last of them."""
    _, rows, width = queries.shape
    keys, values = seen
    shared = len(keys)
    if before is not None:
        keys = torch.cat([before.keys, keys], dim=1)
        values = torch.cat([before.values, values], dim=1)
    grouped = queries.view(shared, -1, rows, width) * width**-0.5
    scores = grouped @ keys[:, None].transpose(-1, -2)
    total = keys.shape[1]
    hidden = torch.ones(rows, total, dtype=torch.bool, device=queries.device)
    scores = scores.masked_fill(hidden.triu(total - rows + 1), float("-inf"))
    if own_keys is None or own_values is None:
        return (scores.softmax(-1) @ values[:, None]).view_as(queries)
    guesses = (grouped * own_keys[:, :, None]).sum(-1).movedim(0, -1)
    weights = torch.cat([scores, guesses], dim=-1).softmax(-1)
    mixed = (weights[..., total:].movedim(-1, 0)[..., None] * own_values[:, :, None]).sum(0)
    return (weights[..., :total] @ values[:, None] + mixed).view_as(queries)


def attend_natively(
    kernels: TrainingKernels, queries: Tensor, seen: Pairs, own: Sequence[Pairs], bounds: Tensor
) -> Tensor:
    """The same on a CPU in float32."""
    by_row = [tensor.transpose(0, 1).contiguous() for tensor in (queries, *seen)]
    others = [tensor.transpose(0, 1).contiguous() for pairs in own for tensor in pairs]
    out: Tensor = _Native.apply(kernels, bounds, *by_row, *others)  # pyright: ignore
    return out.transpose(0, 1)


class _Native(torch.autograd.Function):
    """The kernel's part and the chain's own are joined by their log-sum-exps.

    On the way back either part needs only the joined ones, as in Flash Attention.
    """

    @staticmethod
    def forward(ctx: Any, kernels: TrainingKernels, bounds: Tensor, *tensors: Tensor) -> Tensor:
        queries, keys, values, *own = tensors
        scale = queries.shape[-1] ** -0.5
        out, lse = kernels.attend(queries, keys, values, bounds, scale)
        if own:
            scores = torch.stack([_scores(queries, key, scale) for key in own[::2]])
            joined = torch.logaddexp(lse, scores.logsumexp(0))
            out = _spread(out, (lse - joined).exp_())
            for score, value in zip(scores, own[1::2], strict=True):
                out += _weighted(value, (score - joined).exp_())
            lse = joined
        ctx.kernels, ctx.scale = kernels, scale
        ctx.save_for_backward(bounds, out, lse, *tensors)
        return out

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        bounds, out, lse, queries, keys, values, *own = ctx.saved_tensors
        slope = slopes[0].contiguous()
        toward = ctx.kernels.attend_backward(
            slope, queries, keys, values, out, lse, bounds, ctx.scale
        )
        by_own: list[Tensor] = []
        level = (slope * out).sum(-1)
        for key, value in zip(own[::2], own[1::2], strict=True):
            chance = (_scores(queries, key, ctx.scale) - lse).exp_()
            steep = chance * (_scores(slope, value, 1.0) - level) * ctx.scale
            toward[0].add_(_weighted(key, steep))
            by_own += [_gathered(queries, steep, key), _gathered(slope, chance, value)]
        return None, None, *toward, *by_own


def _scores(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Of each row's heads with its one key: [rows, heads]."""
    rows, shared, width = keys.shape
    grouped = queries.view(rows, shared, -1, width)
    return (grouped * keys[:, :, None]).sum(-1).view(rows, -1).mul_(scale)


def _weighted(values: Tensor, weights: Tensor) -> Tensor:
    rows, shared, width = values.shape
    spread = weights.view(rows, shared, -1, 1) * values[:, :, None]
    return spread.view(rows, -1, width)


def _spread(out: Tensor, weights: Tensor) -> Tensor:
    return out * weights[..., None]


def _gathered(heads: Tensor, weights: Tensor, like: Tensor) -> Tensor:
    """Summed over the heads that share a key."""
    rows, shared, width = like.shape
    return (heads * weights[..., None]).view(rows, shared, -1, width).sum(2)
