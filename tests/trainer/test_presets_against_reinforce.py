"""A preset's gradient is REINFORCE's but where its mechanism acts.

The fixture has an answer that no step has changed, one that moved a little, and two that moved far,
each of both signs. REINFORCE weighs each token by its advantage alone.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.trainer.models import CPU
from tests.unit.test_algorithm_presets import load
from tlt.spec.algorithm_presets import PRESETS
from tlt.spec.config import AlgorithmSpec
from tlt.trainer.policy.loss.loss_variants import TOKEN_LOSSES
from tlt.trainer.policy.loss.policy_loss import LogProbs, policy_loss
from tlt.trainer.policy.model.micro_batches import (
    MicroBatch,
    Minibatch,
    PolicySample,
    build_micro_batches,
)

# of each answer its advantage and the ratios of its tokens, the longest answer first
ANSWERS: list[tuple[float, list[float]]] = [
    (1.0, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
    (1.0, [1.05, 1.0, 1.0, 1.0, 1.0]),
    (-1.0, [0.95, 1.0, 1.0, 1.0]),
    # above all bounds, and an answer's product is far from its tokens
    (1.0, [6.0, 1.1, 1.1]),
    (-1.0, [0.5, 0.9, 0.9]),
    # a bad answer that has become far likelier
    (-1.0, [4.0, 1.0]),
]
RATIOS = [ratio for _, ratios in ANSWERS for ratio in ratios]
LENGTHS = [len(ratios) for _, ratios in ANSWERS]
# By answer, a letter a token: = as REINFORCE, w weighted by the ratio, 0 without a gradient
TOKENS = "====== w==== w=== 0ww 0ww 0="
ACTS: dict[str, str] = {
    "grpo": TOKENS,
    "dr_grpo": TOKENS,
    "dapo": TOKENS,
    "reinforce++": TOKENS,
    "reinforce++-baseline": TOKENS,
    # a ratio for the answer: all its tokens, beyond 1 ± .0004 none
    "gspo": "====== 00000 0000 000 000 ww",
    # the product: the small moves are within 1 ± .2, the large ones beyond
    "rloo": "====== wwwww wwww 000 000 ww",
    # only 6 lies above the cap of 5, and weighs 5
    "cispo": "====== w==== w=== www www w=",
    # the gate fades out, and never to 0
    "sapo": "====== w==== w=== www www w=",
}


def fixture() -> MicroBatch:
    samples = [
        PolicySample(
            prompt=(1,),
            completion=(2,) * len(ratios),
            logprobs=(-1.0,) * len(ratios),
            temperature=1.0,
            advantage=advantage,
        )
        for advantage, ratios in ANSWERS
    ]
    (batch,) = build_micro_batches(samples, 10_000, CPU, packed=True)
    return batch


def slopes(made: AlgorithmSpec, ratios: list[float], reference: Tensor | None = None) -> Tensor:
    """Return the loss's gradient with respect to each token's log-prob."""
    old = torch.full((len(ratios),), -1.0, dtype=torch.float64)
    current = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    minibatch = Minibatch(samples=(), total_tokens=len(ratios), total_sequences=len(ANSWERS))
    scores = LogProbs(current, old, reference, torch.zeros_like(old))
    loss, _ = policy_loss(made, TOKEN_LOSSES[made.loss], fixture(), minibatch, scores)
    (slope,) = torch.autograd.grad(loss, current)
    return slope


def letter(slope: float, plain: float) -> str:
    if slope == 0.0:
        return "0"
    return "=" if slope == pytest.approx(plain, rel=1e-9) else "w"


@pytest.mark.parametrize("name", PRESETS)
def test_a_presets_gradient_is_reinforces_but_where_it_acts(tmp_path: Path, name: str) -> None:
    made = load(tmp_path, f"algorithm.preset={name}").algorithm
    reinforce = slopes(made, [1.0] * len(RATIOS))
    signs = torch.tensor([advantage for advantage, _ in ANSWERS]).repeat_interleave(
        torch.tensor(LENGTHS)
    )
    assert torch.equal(reinforce.sign(), -signs.double().sign())
    found = slopes(made, RATIOS)
    parts = [
        "".join(letter(s, p) for s, p in zip(part.tolist(), plain.tolist(), strict=True))
        for part, plain in zip(found.split(LENGTHS), reinforce.split(LENGTHS), strict=True)
    ]
    assert " ".join(parts) == ACTS[name]


def test_grpos_penalty_acts_where_the_policy_has_left_the_reference(tmp_path: Path) -> None:
    made = load(tmp_path, "algorithm.preset=grpo").algorithm
    reference = torch.full((len(RATIOS),), -1.0, dtype=torch.float64)
    reference[[3, 7]] += torch.tensor([0.5, -0.5], dtype=torch.float64)
    ones = [1.0] * len(RATIOS)
    apart = slopes(made, ones, reference) - slopes(made, ones)
    assert apart.nonzero().flatten().tolist() == [3, 7]
    # towards the reference
    assert apart[3] < 0 < apart[7]


@pytest.mark.parametrize("name", PRESETS)
def test_with_one_optimiser_step_a_presets_gradient_is_reinforces(
    tmp_path: Path, name: str
) -> None:
    """All ratios are 1 before the first step, so a token weighs its share of the average."""
    made = load(tmp_path, f"algorithm.preset={name}").algorithm
    weights = {
        "token": [1 / len(RATIOS)] * len(RATIOS),
        "sequence": [1 / (n * len(ANSWERS)) for n in LENGTHS for _ in range(n)],
        "constant": [1 / (300 * len(ANSWERS))] * len(RATIOS),
    }[made.averaging]
    if made.loss == "rloo":
        # log-probs are summed
        weights = [1 / len(ANSWERS)] * len(RATIOS)
    found = slopes(made, [1.0] * len(RATIOS)).abs().tolist()
    assert found == pytest.approx(weights)
