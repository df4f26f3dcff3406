"""Lay inputs out as peers do: answers x tokens, padded on the right, in float64."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.peer_inputs import Inputs


@dataclass(frozen=True)
class Padded:
    """`logits` has one row per token and is what gradients are taken of."""

    inputs: Inputs
    logits: Tensor
    mask: Tensor
    current: Tensor
    entropy: Tensor
    old: Tensor
    sampler: Tensor
    reference: Tensor
    rewards: Tensor
    advantages: Tensor

    def values(self, padded: Tensor) -> list[float]:
        return padded.expand(self.mask.shape)[self.mask.bool()].tolist()


def pad_inputs(inputs: Inputs) -> Padded:
    logits = doubles(inputs.logits).requires_grad_()
    lengths = torch.tensor(inputs.lengths)
    mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    current, entropy = score(logits, inputs.tokens)

    def padded(flat: Tensor) -> Tensor:
        return torch.zeros(mask.shape, dtype=flat.dtype).masked_scatter(mask, flat)

    return Padded(
        inputs=inputs,
        logits=logits,
        mask=mask.double(),
        current=padded(current),
        entropy=padded(entropy),
        old=padded(doubles(inputs.old)),
        sampler=padded(doubles(inputs.sampler)),
        reference=padded(doubles(inputs.reference)),
        rewards=doubles(inputs.rewards),
        advantages=doubles(inputs.advantages),
    )


def doubles(values: Sequence[float] | Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def score(logits: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return each token's log-prob and entropy."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return chosen, -(logprobs.exp() * logprobs).sum(-1)
