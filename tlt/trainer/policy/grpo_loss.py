"""A minibatch's loss is a sum over its tokens, each weighted by the totals over all ranks.

The order of samples, micro-batches and ranks doesn't change the gradient, up to rounding.
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
    """Compute GRPO's loss with a truncated importance weight for the sampler's mismatch.

    `old` are the learner's log-probs before the update's first step. The penalty towards
    `reference` is added after the importance weight.
    """
    ratio = (current - old).exp()
    clipped = ratio.clamp(1.0 - spec.clip_low, 1.0 + spec.clip_high)
    surrogate = torch.minimum(ratio * batch.advantage, clipped * batch.advantage)
    losses = -_importance_weight(old, batch.behaviour, spec.importance_cap) * surrogate
    reference_kl = None
    if reference is not None:
        reference_kl = _k3(reference - current)
        losses = losses + spec.kl_coefficient * reference_kl
    loss = (losses * _token_weight(spec, batch, minibatch)).sum()
    with torch.no_grad():
        sampling_kl, truncated = sampler_mismatch(spec, old, batch.behaviour)
        metrics = TokenMetrics(
            clipped_low=(ratio < 1.0 - spec.clip_low) & (batch.advantage < 0),
            clipped_high=(ratio > 1.0 + spec.clip_high) & (batch.advantage > 0),
            sampling_kl=sampling_kl,
            reference_kl=reference_kl,
            importance_truncated=truncated,
        )
    return loss, metrics


def sampler_mismatch(spec: AlgorithmSpec, old: Tensor, behaviour: Tensor) -> tuple[Tensor, Tensor]:
    """Return each token's KL between learner and sampler, and if its weight is truncated."""
    gap = old - behaviour
    return _k3(gap.clamp(-20.0, 20.0)), gap > math.log(spec.importance_cap)


def _importance_weight(old: Tensor, behaviour: Tensor, cap: float) -> Tensor:
    """Return how much likelier the learner finds a token than its sampler did, at most `cap`."""
    return (old - behaviour).clamp(max=math.log(cap)).exp().detach()


def _k3(log_ratio: Tensor) -> Tensor:
    """Estimate KL(p || q) by Schulman's k3 from samples of p, given log q - log p."""
    return torch.expm1(log_ratio) - log_ratio


def _token_weight(spec: AlgorithmSpec, batch: MicroBatch, minibatch: Minibatch) -> Tensor:
    match spec.averaging:
        case "token":
            return torch.full_like(batch.advantage, 1.0 / minibatch.total_tokens)
        case "sequence":
            return 1.0 / (batch.length * minibatch.total_sequences)
