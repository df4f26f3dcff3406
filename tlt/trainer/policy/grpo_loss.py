"""A minibatch's loss is a sum over its tokens, each already weighed by the totals over all ranks.

So neither the order of samples, nor micro-batches, nor ranks change the gradient: they only add up.
"""

import math

import torch
from torch import Tensor

from tlt.config import AlgorithmSpec
from tlt.trainer.policy.micro_batches import MicroBatch
from tlt.trainer.policy.samples import Minibatch
from tlt.trainer.policy.update_metrics import TokenMetrics


def grpo_loss(
    spec: AlgorithmSpec,
    batch: MicroBatch,
    minibatch: Minibatch,
    current: Tensor,
    old: Tensor,
    reference: Tensor | None,
) -> tuple[Tensor, TokenMetrics]:
    """GRPO with a truncated correction for the gap between who sampled and who learns.

    `old` is this learner's view of the samples before the update's first step. The penalty
    towards `reference` takes no correction: it is added after the weighing.
    """
    ratio = (current - old).exp()
    clipped = ratio.clamp(1.0 - spec.clip_low, 1.0 + spec.clip_high)
    surrogate = torch.minimum(ratio * batch.advantage, clipped * batch.advantage)
    losses = -importance(old, batch.behaviour, spec.importance_cap) * surrogate
    drift = None
    if reference is not None:
        drift = k3(reference - current)
        losses = losses + spec.kl_coefficient * drift
    loss = (losses * _weight(spec, batch, minibatch)).sum()
    with torch.no_grad():
        sampling_kl, truncated = sampler_mismatch(spec, old, batch.behaviour)
        figures = TokenMetrics(
            clipped_low=(ratio < 1.0 - spec.clip_low) & (batch.advantage < 0),
            clipped_high=(ratio > 1.0 + spec.clip_high) & (batch.advantage > 0),
            sampling_kl=sampling_kl,
            reference_kl=drift,
            importance_truncated=truncated,
        )
    return loss, figures


def sampler_mismatch(spec: AlgorithmSpec, old: Tensor, behaviour: Tensor) -> tuple[Tensor, Tensor]:
    """How far who learns is from who sampled, and whether its weight is cut; for each token."""
    gap = old - behaviour
    return k3(gap.clamp(-20.0, 20.0)), gap > math.log(spec.importance_cap)


def importance(old: Tensor, behaviour: Tensor, cap: float) -> Tensor:
    """How much likelier the learner finds a token than its sampler did, at most `cap`."""
    return (old - behaviour).clamp(max=math.log(cap)).exp().detach()


def k3(log_ratio: Tensor) -> Tensor:
    """Schulman's estimator of KL(p || q) from samples of p, given log q - log p; never negative."""
    return torch.expm1(log_ratio) - log_ratio


def _weight(spec: AlgorithmSpec, batch: MicroBatch, minibatch: Minibatch) -> Tensor:
    match spec.averaging:
        case "token":
            return torch.full_like(batch.advantage, 1.0 / minibatch.total_tokens)
        case "sequence":
            return 1.0 / (batch.length * minibatch.total_sequences)
