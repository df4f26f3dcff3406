"""A minibatch's loss is a sum over its tokens, each weighted by the totals over all ranks.

The order of samples, micro-batches and ranks doesn't change the gradient, up to rounding.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tlt.spec.config import AlgorithmSpec
from tlt.trainer.policy.loss.loss_variants import MOST_NATS, TokenLossFunction
from tlt.trainer.policy.loss.sampler_importance import weigh_by_importance
from tlt.trainer.policy.loss.update_metrics import TokenMetrics
from tlt.trainer.policy.model.micro_batches import MicroBatch, Minibatch


class LogProbs(NamedTuple):
    """Hold log-probs of each completion token, and its entropy."""

    current: Tensor
    # the learner's before the update's first step
    old: Tensor
    reference: Tensor | None
    entropy: Tensor


def policy_loss(
    spec: AlgorithmSpec,
    token_loss: TokenLossFunction,
    batch: MicroBatch,
    minibatch: Minibatch,
    scores: LogProbs,
) -> tuple[Tensor, TokenMetrics]:
    """Compute the loss that the spec names, with a weight for the sampler's mismatch.

    The penalty towards the reference and the bonus for entropy are added after that weight.
    """
    current, old, reference, entropy = scores
    token = token_loss(spec, batch, current, old)
    importance = weigh_by_importance(spec, batch, old)
    losses = importance.weight * token.loss
    reference_kl = None
    if reference is not None:
        reference_kl = _k3(reference - current)
        if spec.kl_in == "loss":
            losses = losses + spec.kl_coefficient * reference_kl
    if spec.entropy_coefficient > 0:
        losses = losses - spec.entropy_coefficient * entropy
    loss = (losses * _token_weight(spec, batch, minibatch)).sum()
    with torch.no_grad():
        metrics = TokenMetrics(
            clipped_low=token.clipped_low,
            clipped_high=token.clipped_high,
            sampling_kl=_k3(old - batch.behaviour),
            reference_kl=reference_kl,
            importance_truncated=importance.beyond,
        )
    return loss, metrics


def compare_with_sampler(
    spec: AlgorithmSpec, batch: MicroBatch, old: Tensor
) -> tuple[Tensor, Tensor]:
    """Return each token's KL between learner and sampler, and which weights are out of bounds."""
    return _k3(old - batch.behaviour), weigh_by_importance(spec, batch, old).beyond


def _k3(log_ratio: Tensor) -> Tensor:
    """Estimate KL(p || q) by Schulman's k3 from samples of p, given log q - log p."""
    bounded = log_ratio.clamp(-MOST_NATS, MOST_NATS)
    return torch.expm1(bounded) - bounded


def _token_weight(spec: AlgorithmSpec, batch: MicroBatch, minibatch: Minibatch) -> Tensor:
    match spec.averaging:
        case "token":
            return torch.full_like(batch.advantage, 1.0 / minibatch.total_tokens)
        case "sequence":
            return 1.0 / (batch.answer_length * minibatch.total_sequences)
        case "constant":
            assert spec.averaged_tokens is not None
            whole = spec.averaged_tokens * minibatch.total_sequences
            return torch.full_like(batch.advantage, 1.0 / whole)
