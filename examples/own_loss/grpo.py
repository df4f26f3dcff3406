"""GRPO's loss and advantage once more, as functions of one's own: `docs/algorithms.md`."""

import torch
from torch import Tensor

from tlt.spec.config import AlgorithmSpec
from tlt.trainer.policy.model.micro_batches import MicroBatch


def loss(spec: AlgorithmSpec, batch: MicroBatch, current: Tensor, old: Tensor) -> Tensor:
    """Clip the ratio of each token's probability to the one before the update."""
    ratio = (current - old).exp()
    bounded = ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    surrogate = torch.minimum(ratio * batch.advantage, bounded * batch.advantage)
    # a token of a bad answer that has become far likelier would outweigh all others
    floor = torch.where(batch.advantage < 0, spec.dual_clip * batch.advantage, -torch.inf)
    return -torch.maximum(surrogate, floor)


def advantage(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """Compare an answer with its group, in standard deviations of the group."""
    found = torch.zeros_like(rewards)
    for group in groups.unique():
        own = groups == group
        # an answer is alone where the others of its group were lost
        if own.sum() > 1:
            found[own] = (rewards[own] - rewards[own].mean()) / (rewards[own].std() + 1e-6)
    return found
