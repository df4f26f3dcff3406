"""A minibatch's loss is a sum over its tokens, each weighted by the totals over all ranks.

The order of samples, micro-batches and ranks doesn't change the gradient, up to rounding.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from tlt.spec.config import AlgorithmSpec
from tlt.trainer.policy.loss.loss_variants import MOST_NATS, TOKEN_LOSSES
from tlt.trainer.policy.loss.update_metrics import TokenMetrics
from tlt.trainer.policy.model.micro_batches import MicroBatch, Minibatch


def policy_loss(
    spec: AlgorithmSpec,
    batch: MicroBatch,
    minibatch: Minibatch,
    current: Tensor,
    old: Tensor,
    reference: Tensor | None,
    entropy: Tensor,
) -> tuple[Tensor, TokenMetrics]:
    """Compute the loss that the spec names, with a weight for the sampler's mismatch.

    `old` are the learner's log-probs before the update's first step. The penalty towards
    `reference` and the bonus for `entropy` are added after that weight.
    """
    if reference is not None and spec.kl_in == "reward":
        penalty = spec.kl_coefficient * _to_go((old - reference).detach(), batch)
        batch = replace(batch, advantage=batch.advantage - penalty)
    token = TOKEN_LOSSES[spec.loss](spec, batch, current, old)
    losses = _importance_weight(spec, batch, old) * token.loss
    reference_kl = None
    if reference is not None:
        reference_kl = _k3(reference - current)
        if spec.kl_in == "loss":
            losses = losses + spec.kl_coefficient * reference_kl
    if spec.entropy_coefficient > 0:
        losses = losses - spec.entropy_coefficient * entropy
    loss = (losses * _token_weight(spec, batch, minibatch)).sum()
    with torch.no_grad():
        sampling_kl, truncated = sampler_mismatch(spec, old, batch.behaviour)
        metrics = TokenMetrics(
            clipped_low=token.clipped_low,
            clipped_high=token.clipped_high,
            sampling_kl=sampling_kl,
            reference_kl=reference_kl,
            importance_truncated=truncated,
        )
    return loss, metrics


def sampler_mismatch(spec: AlgorithmSpec, old: Tensor, behaviour: Tensor) -> tuple[Tensor, Tensor]:
    """Return each token's KL between learner and sampler, and if its weight is bounded."""
    gap, most = old - behaviour, math.log(spec.importance_cap)
    beyond = gap > most if spec.importance == "truncated" else gap.abs() > most
    return _k3(gap), beyond


def _importance_weight(spec: AlgorithmSpec, batch: MicroBatch, old: Tensor) -> Tensor:
    """Return how much likelier the learner finds a token than its sampler did, within bounds.

    Above the cap it is truncated, or tokens beyond the cap on either side, or answers whose mean
    token lies beyond it, are left out.
    """
    gap, most = (old - batch.behaviour).detach(), math.log(spec.importance_cap)
    weight = gap.clamp(max=most).exp()
    match spec.importance:
        case "truncated":
            return weight
        case "token_mask":
            return torch.where(gap.abs() <= most, weight, 0.0)
        case "sequence_mask":
            means = gap.new_zeros(batch.samples).index_add(0, batch.owner, gap / batch.length)
            return torch.where(means.abs()[batch.owner] <= most, weight, 0.0)


def _to_go(values: Tensor, batch: MicroBatch) -> Tensor:
    """Return for each token the sum over it and the tokens after it in its answer."""
    exact = values.double()
    ends = exact.new_zeros(batch.samples).index_add(0, batch.owner, exact).cumsum(0)
    return (ends[batch.owner] - exact.cumsum(0) + exact).to(values.dtype)


def _k3(log_ratio: Tensor) -> Tensor:
    """Estimate KL(p || q) by Schulman's k3 from samples of p, given log q - log p."""
    bounded = log_ratio.clamp(-MOST_NATS, MOST_NATS)
    return torch.expm1(bounded) - bounded


def _token_weight(spec: AlgorithmSpec, batch: MicroBatch, minibatch: Minibatch) -> Tensor:
    match spec.averaging:
        case "token":
            return torch.full_like(batch.advantage, 1.0 / minibatch.total_tokens)
        case "sequence":
            return 1.0 / (batch.length * minibatch.total_sequences)
        case "constant":
            assert spec.averaged_tokens is not None
            whole = spec.averaged_tokens * minibatch.total_sequences
            return torch.full_like(batch.advantage, 1.0 / whole)
