"""Cross-entropy of the drafter to the policy's whole distribution, in bounded memory.

The policy's distribution is its head applied to its last state, so only states have to be stored.
The gradient is the difference of both distributions. It is computed where they are known, so that
no logits have to be stored, nor computed twice, for the backward pass.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tlt.base.interrupt_check import CheckInterrupt, never_interrupt
from tlt.models.eagle_drafter import Drafter
from tlt.models.float32_product import multiply_wide
from tlt.trainer.drafter.interruptible_matmul import work_per_check
from tlt.trainer.policy.model import logprobs


class DistillationSums(NamedTuple):
    """Sums over the rows."""

    loss: Tensor
    # probability that both distributions have in common: roughly what shared noise would accept
    overlap: Tensor


class Heads(NamedTuple):
    """The matrices whose products with states are the logits of drafter and policy.

    A drafter that can propose some tokens only learns the policy's distribution over those.
    What the policy gives to others is a rejection whatever the drafter proposes, and the proposal
    that is accepted most often is the same whether it counts or not.
    """

    own: Tensor
    policys: Tensor

    @staticmethod
    def of(drafter: Drafter, policy_head: Tensor) -> "Heads":
        own, tokens = drafter.head(policy_head), drafter.tokens
        if tokens is None or drafter.config.own_head is None:
            return Heads(own, own)
        return Heads(own, policy_head[tokens])


def distillation_loss(
    heads: Heads,
    readout: Tensor,
    policy_states: Tensor,
    check: CheckInterrupt = never_interrupt,
) -> DistillationSums:
    """Compare the drafter's readout with the policy's last states, both [rows, hidden]."""
    return DistillationSums(
        *_DistillationLoss.apply(readout, heads.own, policy_states, heads.policys, check)  # pyright: ignore
    )


class _DistillationLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        readout: Tensor,
        own: Tensor,
        policy_states: Tensor,
        policy_head: Tensor,
        check: CheckInterrupt,
    ) -> tuple[Tensor, Tensor]:
        gradient = torch.zeros_like(readout)
        own_gradient = torch.zeros_like(own) if ctx.needs_input_grad[1] else None
        loss, overlap = readout.new_zeros(()), readout.new_zeros(())
        # twice, because there are two distributions
        rows = max(1, logprobs.CHUNK_LOGITS // (2 * len(own)))
        for states, targets, out in zip(
            readout.split(rows), policy_states.split(rows), gradient.split(rows), strict=True
        ):
            width = max(1, work_per_check(states) // max(1, states.numel()))
            drafters = _log_distribution(states, own, width, check)
            policys = _log_distribution(targets, policy_head, width, check)
            for at, guessed, target in zip(
                range(0, len(own), width), drafters, policys, strict=True
            ):
                tokens = slice(at, at + width)
                check()
                target.exp_()
                loss -= torch.dot(target.flatten(), guessed.flatten())
                probability = guessed.exp_()
                overlap += torch.minimum(probability, target).sum()
                error = probability.sub_(target)
                check()
                _add_product(out, error, own[tokens])
                if own_gradient is not None:
                    own_gradient[tokens].addmm_(error.T, states)
        ctx.gradients = gradient, own_gradient
        ctx.mark_non_differentiable(overlap)
        return loss, overlap

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        gradient, own_gradient = ctx.gradients
        own = None if own_gradient is None else slopes[0] * own_gradient
        return slopes[0] * gradient, own, None, None, None


def _add_product(out: Tensor, error: Tensor, rows: Tensor) -> None:
    if rows.dtype == out.dtype:
        out.addmm_(error, rows)
    else:
        out.add_(multiply_wide(error, rows.t()))


def _log_distribution(
    states: Tensor, head: Tensor, width: int, check: CheckInterrupt
) -> list[Tensor]:
    """Return log-probabilities in parts of `width` tokens, with a check before each."""
    parts: list[Tensor] = []
    for rows in head.split(width):
        check()
        parts.append(multiply_wide(states, rows))
    if len(parts) == 1:
        return [parts[0].log_softmax(-1)]
    sums: list[Tensor] = []
    for part in parts:
        check()
        sums.append(part.logsumexp(-1))
    total = torch.stack(sums).logsumexp(0)[:, None]
    for part in parts:
        check()
        part.sub_(total)
    return parts
