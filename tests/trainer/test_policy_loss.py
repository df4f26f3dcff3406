"""The loss is right for numbers that can be checked by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.models import CPU, spec
from tlt.trainer.policy.loss.loss_variants import TokenLossFunction, clipped, rloo
from tlt.trainer.policy.loss.policy_loss import LogProbs, policy_loss
from tlt.trainer.policy.loss.update_metrics import TokenMetrics
from tlt.trainer.policy.model.micro_batches import (
    MicroBatch,
    Minibatch,
    PolicySample,
    build_micro_batches,
)


def batch_of(advantages: list[float], lengths: list[int], behaviour: float = -1.0) -> MicroBatch:
    made = [
        PolicySample(
            prompt=(1,),
            completion=(2,) * length,
            logprobs=(behaviour,) * length,
            temperature=1.0,
            advantage=advantage,
        )
        for advantage, length in zip(advantages, lengths, strict=True)
    ]
    (batch,) = build_micro_batches(made, 10_000, CPU, packed=False)
    return batch


def loss_of(
    batch: MicroBatch,
    ratios: list[float],
    old: float = -1.0,
    reference: Tensor | None = None,
    totals: tuple[int, int] | None = None,
    token_loss: TokenLossFunction = clipped,
    **changes: Any,
) -> tuple[float, Tensor, TokenMetrics]:
    """Return the loss, its gradient with respect to each token's log-prob, and the metrics."""
    before = torch.full((len(ratios),), old)
    current = (before + torch.tensor(ratios).log()).requires_grad_()
    tokens, sequences = totals or (len(ratios), batch.samples)
    minibatch = Minibatch(samples=(), total_tokens=tokens, total_sequences=sequences)
    scores = LogProbs(current, before, reference, torch.zeros(len(ratios)))
    loss, figures = policy_loss(spec(**changes), token_loss, batch, minibatch, scores)
    (slope,) = torch.autograd.grad(loss, current)
    return loss.item(), slope, figures


@pytest.mark.parametrize(
    ("advantage", "ratio", "value", "moves"),
    [
        (1.0, 1.1, 1.1, True),
        (1.0, 1.29, 1.28, False),
        (1.0, 0.5, 0.5, True),
        (-1.0, 0.79, -0.8, False),
        (-1.0, 0.81, -0.81, True),
        (-1.0, 2.9, -2.9, True),
        (-2.0, 4.0, -6.0, False),
    ],
)
def test_each_bound_clips_on_its_own_side(
    advantage: float, ratio: float, value: float, moves: bool
):
    batch = batch_of([advantage], [1])
    loss, slope, figures = loss_of(batch, [ratio], clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    assert loss == pytest.approx(-value, rel=1e-5)
    assert bool(slope[0] != 0) is moves
    too_high = ratio > 1.28 if advantage > 0 else ratio > 3.0
    assert bool(figures.clipped_high[0]) is too_high
    assert bool(figures.clipped_low[0]) is (advantage < 0 and ratio < 0.8)


def test_token_averaging_divides_by_the_tokens_of_all_ranks():
    batch = batch_of([1.0, 1.0], [3, 1])
    _, slope, _ = loss_of(batch, [1.0] * 4, totals=(40, 7), averaging="token")
    torch.testing.assert_close(slope, torch.full((4,), -1 / 40))


def test_sequence_averaging_gives_every_answer_the_same_weight():
    batch = batch_of([1.0, 1.0], [3, 1])
    _, slope, _ = loss_of(batch, [1.0] * 4, totals=(40, 7), averaging="sequence")
    torch.testing.assert_close(slope, -torch.tensor([1 / 21, 1 / 21, 1 / 21, 1 / 7]))


def test_the_conversations_of_an_answer_share_its_weight():
    halves = [
        PolicySample(
            prompt=(1,),
            completion=(2,) * length,
            logprobs=(-1.0,) * length,
            temperature=1.0,
            advantage=1.0,
            answer_tokens=4,
        )
        for length in (3, 1)
    ]
    (batch,) = build_micro_batches(halves, 100, CPU, packed=True)
    _, slope, _ = loss_of(batch, [1.0] * 4, totals=(40, 7), averaging="sequence")
    torch.testing.assert_close(slope, torch.full((4,), -1 / 28))


@pytest.mark.parametrize(
    ("behaviour", "weight"), [(-1.5, math.exp(0.5)), (-3.0, 2.0), (-0.5, math.exp(-0.5))]
)
def test_importance_weight_is_truncated_from_above_only(behaviour: float, weight: float):
    batch = batch_of([1.0], [1], behaviour)
    loss, slope, figures = loss_of(batch, [1.0], importance_cap=2.0)
    assert loss == pytest.approx(-weight, rel=1e-5)
    assert slope.item() == pytest.approx(-weight, rel=1e-5)
    assert bool(figures.importance_truncated[0]) is (weight == 2.0)


def test_unlikely_token_overflows_nothing():
    batch = batch_of([1.0], [1], behaviour=-1000.0)
    loss, _, figures = loss_of(batch, [1.0])
    assert loss == pytest.approx(-2.0)
    assert torch.isfinite(figures.sampling_kl).all()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("gap", [-200.0, 200.0])
def test_log_probs_far_apart_overflow_nothing(advantage: float, gap: float):
    """The ratio's and the penalty's exponentials would be infinite, and a gradient not a number."""
    batch = batch_of([advantage], [1])
    current = torch.tensor([-1.0 + gap]).requires_grad_()
    minibatch = Minibatch(samples=(), total_tokens=1, total_sequences=1)
    old, reference = torch.tensor([-1.0]), torch.tensor([-1.0])
    scores = LogProbs(current, old, reference, torch.zeros(1))
    loss, figures = policy_loss(spec(kl_coefficient=0.1), clipped, batch, minibatch, scores)
    (slope,) = torch.autograd.grad(loss, current)
    assert torch.isfinite(loss)
    assert torch.isfinite(slope).all()
    assert figures.reference_kl is not None
    assert torch.isfinite(figures.reference_kl).all()


def test_the_penalty_is_k3_and_takes_no_importance_weight():
    batch = batch_of([0.0], [1], behaviour=-3.0)
    loss, slope, figures = loss_of(batch, [1.0], reference=torch.tensor([-1.7]), kl_coefficient=0.5)
    expected = math.exp(-0.7) + 0.7 - 1
    assert figures.reference_kl is not None
    assert figures.reference_kl.item() == pytest.approx(expected, rel=1e-5)
    assert loss == pytest.approx(0.5 * expected, rel=1e-5)
    assert slope.item() == pytest.approx(0.5 * (1 - math.exp(-0.7)), rel=1e-5)


def test_sequence_mask_tests_the_product_of_an_answers_weights_and_counts_answers():
    """Each token's weight is 1.1, far below the cap, and their product 2.6."""
    batch = batch_of([1.0, 1.0], [10, 2], behaviour=-1.0 - math.log(1.1))
    _, slope, figures = loss_of(batch, [1.0] * 12, importance="sequence_mask", importance_cap=2.0)
    assert figures.importance_truncated.tolist() == [True, False]
    assert (slope == 0).tolist() == [True] * 10 + [False] * 2
    torch.testing.assert_close(slope[10:], torch.full((2,), -(1.1**2) / 12))


def test_geometric_mask_tests_the_mean_by_bounds_of_its_own():
    batch = batch_of([1.0, 1.0], [10, 2], behaviour=-1.0 - math.log(1.1))
    wide = loss_of(batch, [1.0] * 12, importance="geometric_mask", geometric_bounds=(0.9, 1.2))
    tight = loss_of(batch, [1.0] * 12, importance="geometric_mask")
    assert wide[2].importance_truncated.tolist() == [False, False]
    assert tight[2].importance_truncated.tolist() == [True, True]
    assert tight[1].abs().max() == 0


def test_rloo_has_one_ratio_for_an_answer_and_does_not_divide_by_its_length():
    batch = batch_of([1.0, 1.0], [4, 1])
    _, slope, figures = loss_of(
        batch, [1.1] * 4 + [1.1], token_loss=rloo, averaging="sequence", loss="rloo"
    )
    # 1.1**4 lies above 1.28
    assert slope.tolist() == pytest.approx([0.0] * 4 + [-1.1 / 2])
    assert figures.clipped_high.tolist() == [True] * 4 + [False]
    _, slope, _ = loss_of(batch, [1.0] * 5, token_loss=rloo, averaging="sequence", loss="rloo")
    assert slope.tolist() == pytest.approx([-1 / 2] * 5)
