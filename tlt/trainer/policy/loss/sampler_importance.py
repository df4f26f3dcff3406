"""Weight tokens by how much likelier the learner finds them than their sampler did, within bounds.

The sampler computes with other kernels, and maybe in another precision: `algorithm.importance`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tlt.spec.config import AlgorithmSpec
from tlt.trainer.policy.loss.loss_variants import bounded_exp
from tlt.trainer.policy.model.micro_batches import MicroBatch


class Importance(NamedTuple):
    # one for each token
    weight: Tensor
    # True where a weight lies beyond its bounds: one for each weight, of a token or of an answer
    beyond: Tensor


def weigh_by_importance(spec: AlgorithmSpec, batch: MicroBatch, old: Tensor) -> Importance:
    """Compare the learner's log-probs before the update's first step with the sampler's."""
    gap = (old - batch.behaviour).detach()
    tokens = bounded_exp(gap)
    match spec.importance:
        case "token_truncate":
            return _truncate(spec, tokens)
        case "token_mask":
            return _mask(spec, tokens)
        case "sequence_truncate":
            answers = _truncate(spec, bounded_exp(batch.sum_by_answer(gap)))
            return Importance(answers.weight[batch.owner], answers.beyond)
        case "sequence_mask":
            answers = _mask(spec, bounded_exp(batch.sum_by_answer(gap)))
            return Importance(answers.weight[batch.owner], answers.beyond)
        case "geometric_mask":
            low, high = spec.geometric_bounds
            means = bounded_exp(batch.sum_by_answer(gap / batch.length))
            beyond = (means < low) | (means > high)
            kept = torch.where(beyond[batch.owner], 0.0, _truncate(spec, tokens).weight)
            return Importance(kept, beyond)


def _truncate(spec: AlgorithmSpec, weights: Tensor) -> Importance:
    cap = spec.importance_cap
    return Importance(weights.clamp(max=cap), weights > cap)


def _mask(spec: AlgorithmSpec, weights: Tensor) -> Importance:
    beyond = (weights > spec.importance_cap) | (weights < spec.importance_floor)
    return Importance(torch.where(beyond, 0.0, weights), beyond)
