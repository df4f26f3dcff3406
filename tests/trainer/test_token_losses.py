"""Each loss is that of its paper: values and gradients of plain loops in float64."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.models import CPU, spec
from tlt.spec.config import AlgorithmSpec
from tlt.spec.data_and_algorithm import LOSSES
from tlt.trainer.policy.loss.loss_variants import TOKEN_LOSSES
from tlt.trainer.policy.loss.policy_loss import LogProbs, policy_loss
from tlt.trainer.policy.model.micro_batches import (
    MicroBatch,
    Minibatch,
    PolicySample,
    build_micro_batches,
)

LENGTHS, ADVANTAGES = [3, 5, 1, 4], [1.5, -0.7, -2.0, 0.4]
# of the minibatch over all ranks
TOKENS, SEQUENCES = 29, 7
# ratio, advantage, spec, and the log-prob itself
PlainLoss = Callable[[Tensor, float, AlgorithmSpec, Tensor], Tensor]


def plain_clipped(ratio: Tensor, advantage: float, spec: AlgorithmSpec, _: Tensor) -> Tensor:
    bounded = min(max(ratio.item(), 1 - spec.clip_low), 1 + spec.clip_high) * advantage
    value = ratio * advantage if ratio.item() * advantage <= bounded else ratio * 0 + bounded
    if advantage < 0 and value.item() < spec.dual_clip * advantage:
        value = ratio * 0 + spec.dual_clip * advantage
    return -value


def plain_cispo(ratio: Tensor, advantage: float, spec: AlgorithmSpec, logprob: Tensor) -> Tensor:
    return -min(ratio.item(), 1 + spec.clip_high) * advantage * logprob


def plain_sapo(ratio: Tensor, advantage: float, spec: AlgorithmSpec, _: Tensor) -> Tensor:
    tau = 1.0 if advantage > 0 else 1.05
    return -(4 / tau) / (1 + torch.exp(-tau * (ratio - 1))) * advantage


PLAIN: dict[str, PlainLoss] = {
    "clipped": plain_clipped,
    "cispo": plain_cispo,
    "sapo": plain_sapo,
}


def plain_weight(made: AlgorithmSpec, gaps: list[float], token: int) -> float:
    """Return the weight of a token whose answer has these gaps to its sampler."""
    cap, floor = made.importance_cap, made.importance_floor
    own, answer = math.exp(gaps[token]), math.exp(sum(gaps))
    match made.importance:
        case "token_truncate":
            return min(own, cap)
        case "token_mask":
            return own if floor <= own <= cap else 0.0
        case "sequence_truncate":
            return min(answer, cap)
        case "sequence_mask":
            return answer if floor <= answer <= cap else 0.0
        case "geometric_mask":
            low, high = made.geometric_bounds
            inside = low <= math.exp(sum(gaps) / len(gaps)) <= high
            return min(own, cap) if inside else 0.0


def plain_sum(
    name: str,
    made: AlgorithmSpec,
    current: Tensor,
    old: Tensor,
    behaviour: Tensor,
    reference: Tensor | None,
) -> Tensor:
    """Sum over answers and their tokens; for GSPO and RLOO over answers, each with one ratio.

    The entropy of a token is here that of its own probability alone.
    """
    total, first = current.sum() * 0, 0
    for length, advantage in zip(LENGTHS, ADVANTAGES, strict=True):
        rows = slice(first, first + length)
        gaps = (old[rows] - behaviour[rows]).tolist()
        for token in range(length):
            here = first + token
            match made.averaging:
                case "token":
                    weight = 1 / TOKENS
                case "sequence":
                    weight = 1 / (length * SEQUENCES)
                case "constant":
                    weight = 1 / ((made.averaged_tokens or 0) * SEQUENCES)
            beside = -made.entropy_coefficient * -(current[here].exp() * current[here])
            if reference is not None and made.kl_in == "loss":
                apart = reference[here] - current[here]
                beside = beside + made.kl_coefficient * (apart.exp() - apart - 1)
            total = total + weight * beside
            undual = spec(clip_low=made.clip_low, clip_high=made.clip_high, dual_clip=1e9)
            match name:
                case "gspo":
                    ratio = (current[rows] - old[rows]).mean().exp()
                    loss = plain_clipped(ratio, advantage, undual, ratio)
                case "rloo":
                    ratio = (current[rows] - old[rows]).sum().exp()
                    loss = plain_clipped(ratio, advantage, undual, ratio)
                case _:
                    logprob = current[here]
                    ratio = (logprob - old[here]).exp()
                    loss = PLAIN[name](ratio, advantage, made, logprob)
            total = total + weight * plain_weight(made, gaps, token) * loss
        first += length
    return total


def micro_batch(behaviour: Tensor) -> MicroBatch:
    parts = behaviour.split(LENGTHS)
    samples = [
        PolicySample(
            prompt=(1,),
            completion=(2,) * length,
            logprobs=tuple(part.tolist()),
            temperature=1.0,
            advantage=advantage,
        )
        for length, advantage, part in zip(LENGTHS, ADVANTAGES, parts, strict=True)
    ]
    (batch,) = build_micro_batches(samples, 10_000, CPU, packed=True)
    # the longest come first there; here their order is that of the lists
    order = torch.tensor(sorted(range(len(LENGTHS)), key=lambda i: -LENGTHS[i]))
    assert batch.length.unique_consecutive().tolist() == torch.tensor(LENGTHS)[order].tolist()
    return batch


def in_batch_order(values: Tensor) -> Tensor:
    """Sort a tensor of all tokens as a micro-batch does, the longest answer first."""
    parts = values.split(LENGTHS)
    return torch.cat([parts[i] for i in sorted(range(len(LENGTHS)), key=lambda i: -LENGTHS[i])])


CASES: list[tuple[str, dict[str, Any]]] = [
    ("clipped", {}),
    ("clipped", {"averaging": "sequence", "clip_high": 0.2}),
    ("clipped", {"averaging": "constant", "averaged_tokens": 16, "dual_clip": 1.5}),
    ("clipped", {"importance": "token_mask", "importance_cap": 1.2}),
    ("clipped", {"importance": "token_mask", "importance_cap": 1.2, "importance_floor": 0.9}),
    ("clipped", {"importance": "sequence_truncate", "importance_cap": 1.1}),
    ("clipped", {"importance": "sequence_mask", "importance_cap": 1.3}),
    ("clipped", {"importance": "sequence_mask", "importance_floor": 0.9}),
    ("clipped", {"importance": "geometric_mask", "geometric_bounds": (0.9, 1.05)}),
    ("gspo", {"averaging": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}),
    ("gspo", {"averaging": "sequence", "clip_low": 0.1, "clip_high": 0.1}),
    ("cispo", {"clip_high": 0.5}),
    ("cispo", {"clip_high": 5.0}),
    ("sapo", {"averaging": "sequence"}),
    ("clipped", {"kl_coefficient": 0.2}),
    ("rloo", {"averaging": "sequence", "clip_low": 0.2, "clip_high": 0.2}),
    ("rloo", {"averaging": "sequence", "clip_low": 0.9, "clip_high": 5.0}),
    ("clipped", {"entropy_coefficient": 0.1}),
    ("sapo", {"entropy_coefficient": 0.1, "kl_coefficient": 0.1, "averaging": "sequence"}),
]


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_losses_are_those_of_plain_loops(name: str, changes: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(4)
    count = sum(LENGTHS)
    # behaviour is stored in float32
    behaviour = (-torch.rand(count, generator=generator)).float()
    old = behaviour.double() + 0.2 * torch.randn(count, generator=generator).double()
    current = (old + 0.5 * torch.randn(count, generator=generator).double()).requires_grad_()
    made = spec(loss=name, **changes)
    reference = None
    if made.kl_coefficient > 0:
        reference = old - 0.3 * torch.randn(count, generator=generator).double()
    expected = plain_sum(name, made, current, old, behaviour.double(), reference)
    (plain_slope,) = torch.autograd.grad(expected, current)
    batch = micro_batch(behaviour)
    minibatch = Minibatch(samples=(), total_tokens=TOKENS, total_sequences=SEQUENCES)
    anchor = None if reference is None else in_batch_order(reference)
    scores = LogProbs(
        in_batch_order(current),
        in_batch_order(old),
        anchor,
        in_batch_order(-current.exp() * current),
    )
    loss, _ = policy_loss(made, TOKEN_LOSSES[name], batch, minibatch, scores)
    (slope,) = torch.autograd.grad(loss, current)
    # advantages are stored in float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(slope, plain_slope, rtol=1e-6, atol=1e-9)
    assert plain_slope.abs().max() > 0


def test_all_losses_are_tested() -> None:
    assert {name for name, _ in CASES} == TOKEN_LOSSES.keys() == set(LOSSES)
