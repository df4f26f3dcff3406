"""Attention of chains: a query sees the policy's positions up to its chain's start, then its own
chain's guesses.

Row r of every step belongs to the chain that begins at row r. So what a step sees of step 0 is
plain causal attention, and of later steps it sees only its own row.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tlt.base.interrupt_check import CheckInterrupt, never_interrupt
from tlt.kernels.training_kernels import TrainingKernels
from tlt.trainer.drafter.interruptible_matmul import check_backward, work_per_check

# cost of mask and softmax for one score, in multiplications
_SCORE_COST = 256
# bytes of a step's scores that are stored for the backward pass; more are computed again, block by
# block, as those of long answers would take most of a device's memory
MOST_STORED = 64 << 20


class KeysValues(NamedTuple):
    """Keys and values of one step: [key-value heads, rows, width]."""

    keys: Tensor
    values: Tensor


def attend(
    queries: Tensor,
    first_step: KeysValues,
    later_steps: Sequence[KeysValues],
    bounds: Tensor,
    prefix: KeysValues | None,
    check: CheckInterrupt = never_interrupt,
) -> Tensor:
    """Return [heads, rows, width]; `prefix` are rows ahead of the only sample, seen by all."""
    ends: list[int] = bounds.tolist()
    own_keys = torch.stack([step.keys for step in later_steps]) if later_steps else None
    own_values = torch.stack([step.values for step in later_steps]) if later_steps else None
    prefix_rows = 0 if prefix is None else prefix.keys.shape[1]
    heads, _, width = queries.shape
    scores = work_per_check(queries) // (heads * (width + _SCORE_COST))
    pairs = sum((last - first) * (prefix_rows + last - first) for first, last in pairwise(ends))
    attend_block: Callable[..., Tensor] = _attend_block
    if heads * pairs * queries.element_size() > MOST_STORED:
        attend_block = partial(
            checkpoint, _attend_block, use_reentrant=False, preserve_rng_state=False
        )
    parts: list[Tensor] = []
    for first, last in pairwise(ends):
        block = max(1, scores // max(1, prefix_rows + last - first))
        for begin in range(first, last, block):
            rows = slice(begin, min(last, begin + block))
            check()
            part = attend_block(
                queries[:, rows],
                KeysValues(*(tensor[:, first : rows.stop] for tensor in first_step)),
                None if own_keys is None else own_keys[:, :, rows],
                None if own_values is None else own_values[:, :, rows],
                prefix,
            )
            check_backward(part, check)
            parts.append(part)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _attend_block(
    queries: Tensor,
    seen: KeysValues,
    own_keys: Tensor | None,
    own_values: Tensor | None,
    prefix: KeysValues | None,
) -> Tensor:
    """Attend with some rows of one sample to the keys up to the last of them."""
    _, rows, width = queries.shape
    keys, values = seen
    kv_heads = len(keys)
    if prefix is not None:
        keys = torch.cat([prefix.keys, keys], dim=1)
        values = torch.cat([prefix.values, values], dim=1)
    grouped = queries.view(kv_heads, -1, rows, width) * width**-0.5
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


def attend_in_c(
    kernels: TrainingKernels,
    queries: Tensor,
    first_step: KeysValues,
    later_steps: Sequence[KeysValues],
    bounds: Tensor,
) -> Tensor:
    """Compute the same as `attend` without a prefix, on a CPU in float32."""
    by_row = [tensor.transpose(0, 1).contiguous() for tensor in (queries, *first_step)]
    later = [tensor.transpose(0, 1).contiguous() for step in later_steps for tensor in step]
    out: Tensor = _ChainAttention.apply(kernels, bounds, *by_row, *later)  # pyright: ignore
    return out.transpose(0, 1)


class _ChainAttention(torch.autograd.Function):
    """Join the kernel's causal part and the chain's own part by their log-sum-exps.

    Either part's backward pass needs only the joined log-sum-exp, as in Flash Attention.
    """

    @staticmethod
    def forward(ctx: Any, kernels: TrainingKernels, bounds: Tensor, *tensors: Tensor) -> Tensor:
        queries, keys, values, *own = tensors
        scale = queries.shape[-1] ** -0.5
        out, lse = kernels.attend(queries, keys, values, bounds, scale)
        if own:
            scores = torch.stack([_own_scores(queries, key, scale) for key in own[::2]])
            joined = torch.logaddexp(lse, scores.logsumexp(0))
            out = out * (lse - joined).exp_()[..., None]
            for score, value in zip(scores, own[1::2], strict=True):
                out += _spread(value, (score - joined).exp_())
            lse = joined
        ctx.kernels, ctx.scale = kernels, scale
        ctx.save_for_backward(bounds, out, lse, *tensors)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        bounds, out, lse, queries, keys, values, *own = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        causal = ctx.kernels.attend_backward(
            gradient, queries, keys, values, out, lse, bounds, ctx.scale
        )
        own_gradients: list[Tensor] = []
        level = (gradient * out).sum(-1)
        for key, value in zip(own[::2], own[1::2], strict=True):
            weight = (_own_scores(queries, key, ctx.scale) - lse).exp_()
            score_gradient = weight * (_own_scores(gradient, value, 1.0) - level) * ctx.scale
            causal[0].add_(_spread(key, score_gradient))
            own_gradients += [
                _gather(queries, score_gradient, key),
                _gather(gradient, weight, value),
            ]
        return None, None, *causal, *own_gradients


def _own_scores(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Score each row's heads against that row's one key: [rows, heads]."""
    rows, kv_heads, width = keys.shape
    grouped = queries.view(rows, kv_heads, -1, width)
    return (grouped * keys[:, :, None]).sum(-1).view(rows, -1).mul_(scale)


def _spread(values: Tensor, weights: Tensor) -> Tensor:
    """Weigh each row's value for every head that shares it: [rows, heads, width]."""
    rows, kv_heads, width = values.shape
    weighted = weights.view(rows, kv_heads, -1, 1) * values[:, :, None]
    return weighted.view(rows, -1, width)


def _gather(heads: Tensor, weights: Tensor, like: Tensor) -> Tensor:
    """Sum the weighted heads that share a key: the shape of `like`."""
    rows, kv_heads, width = like.shape
    return (heads * weights[..., None]).view(rows, kv_heads, -1, width).sum(2)
