"""Cross-entropy to the policy's whole distribution, never more than CHUNK logits of it at once.

The distribution is the head of the policy's last state, so nothing but states has to be kept. The
gradient is the difference of both distributions: it is made where they are known, so that no logits
have to be kept, nor computed twice, for the way back.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tlt.interrupt import CheckInterrupt, never_interrupt
from tlt.models.eagle_drafter import Drafter
from tlt.trainer.drafter.interruptible_matmul import stretch
from tlt.trainer.policy import logprobs


class Distance(NamedTuple):
    """Sums over the rows."""

    loss: Tensor
    # probability that both distributions have in common: what shared noise would accept, roughly
    overlap: Tensor


def distance(
    drafter: Drafter,
    readout: Tensor,
    last_states: Tensor,
    head: Tensor,
    check: CheckInterrupt = never_interrupt,
) -> Distance:
    """Of the drafter's distributions from the policy's, both [rows, hidden]."""
    own = drafter.head(head)
    # a head of the drafter's own has rows for some tokens only
    known = head if own is head else head[drafter.tokens(torch.arange(len(own), device=own.device))]
    return Distance(*_Distance.apply(readout, own, last_states, known, check))  # pyright: ignore


class _Distance(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        readout: Tensor,
        own: Tensor,
        last_states: Tensor,
        known: Tensor,
        check: CheckInterrupt,
    ) -> tuple[Tensor, Tensor]:
        slope = torch.zeros_like(readout)
        own_slope = torch.zeros_like(own) if ctx.needs_input_grad[1] else None
        loss, overlap = readout.new_zeros(()), readout.new_zeros(())
        # of both distributions
        rows = max(1, logprobs.CHUNK // (2 * len(own)))
        for ours, theirs, toward in zip(
            readout.split(rows), last_states.split(rows), slope.split(rows), strict=True
        ):
            width = max(1, stretch(ours) // max(1, ours.numel()))
            found = _likely(ours, own, width, check)
            aims = _likely(theirs, known, width, check)
            for at, likely, wanted in zip(range(0, len(own), width), found, aims, strict=True):
                tokens = slice(at, at + width)
                check()
                wanted.exp_()
                loss -= torch.dot(wanted.flatten(), likely.flatten())
                chance = likely.exp_()
                overlap += torch.minimum(chance, wanted).sum()
                error = chance.sub_(wanted)
                check()
                toward.addmm_(error, own[tokens])
                if own_slope is not None:
                    own_slope[tokens].addmm_(error.T, ours)
        ctx.slopes = slope, own_slope
        ctx.mark_non_differentiable(overlap)
        return loss, overlap

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        slope, own_slope = ctx.slopes
        own = None if own_slope is None else slopes[0] * own_slope
        return slopes[0] * slope, own, None, None, None


def _likely(states: Tensor, head: Tensor, width: int, check: CheckInterrupt) -> list[Tensor]:
    """Logarithms of the distributions, in parts of the vocabulary with a look before each."""
    parts: list[Tensor] = []
    for rows in head.split(width):
        check()
        parts.append(F.linear(states, rows))
    if len(parts) == 1:
        return [parts[0].log_softmax(-1)]
    sizes: list[Tensor] = []
    for part in parts:
        check()
        sizes.append(part.logsumexp(-1))
    size = torch.stack(sizes).logsumexp(0)[:, None]
    for part in parts:
        check()
        part.sub_(size)
    return parts
