"""A drafter that proposes some tokens only learns what the policy draws of them."""

import pytest
import torch

from tests.trainer.drafters import (
    HIDDEN,
    LAYOUTS,
    VOCABULARY,
    drafter,
    ends,
    learner,
    samples,
    whole,
)
from tlt.trainer.drafter.accept_length import PolicyRollout, accept_lengths
from tlt.trainer.drafter.distillation_loss import Heads, distillation_loss
from tlt.trainer.drafter.initial_drafter import choose_tokens
from tlt.trainer.drafter.samples import DrafterSample

HOT = 12


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_compares_distributions_over_its_tokens(layout: str) -> None:
    made, policy_head = drafter(layout, hot_tokens=HOT), ends().head
    readout = torch.randn(5, 16, dtype=torch.float64, requires_grad=True)
    states = torch.randn(5, 16, dtype=torch.float64)
    sums = distillation_loss(Heads.of(made, policy_head), readout, states)
    rows = policy_head[made.tokens]
    target = (states @ rows.T).softmax(-1)
    expected = -(target * (readout @ rows.T).log_softmax(-1)).sum()
    assert sums.loss.item() == pytest.approx(expected.item())
    (slope,) = torch.autograd.grad(sums.loss, readout)
    (wanted,) = torch.autograd.grad(expected, readout)
    torch.testing.assert_close(slope, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_token_that_it_cannot_propose_counts_as_a_rejection(layout: str) -> None:
    made = drafter(layout, hot_tokens=HOT)
    states = torch.randn(19, 1 if layout == "eagle" else 4, HIDDEN, dtype=torch.float64)

    def only(token: int) -> float:
        """Return the accept length of a text of one token, which the noise makes likely."""
        written = DrafterSample(tokens=[token] * 20, prompt=2, states=states)

        def noise(positions: torch.Tensor, chosen: torch.Tensor | None) -> torch.Tensor:
            table = torch.zeros(len(positions), VOCABULARY)
            table[:, token] = 1e6
            return table if chosen is None else table[:, chosen]

        lengths = accept_lengths(made, ends(), [PolicyRollout(sample=written, noise=noise)], (3,))
        return lengths.noise[3]

    # it can propose every second token
    assert only(2) > 3
    assert only(3) == 1


def test_chooses_what_the_policy_draws_most_often() -> None:
    made, chosen = drafter("eagle", hot_tokens=HOT), samples("eagle", 4)
    choose_tokens(made, ends().head, chosen)
    states = torch.cat([sample.states[sample.prompt - 1 :, -1] for sample in chosen])
    mean = (states @ ends().head.T).softmax(-1).mean(0)
    assert made.tokens is not None
    assert made.tokens.tolist() == sorted(mean.topk(HOT).indices.tolist())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_learner_goes_on_with_its_tokens_to_the_bit(layout: str) -> None:
    batch = whole(samples(layout, 4), 3)
    straight, resumed = learner(layout, hot_tokens=HOT), learner(layout, hot_tokens=HOT)
    straight.learn(batch)
    assert straight.drafter().d2t is not None
    state = straight.state()
    state["d2t"] = state["d2t"] + 1
    straight.load(state)
    resumed.load(state)
    assert straight.learn(batch) == resumed.learn(batch)
    tokens = resumed.drafter().tokens
    assert tokens is not None
    assert tokens.tolist() == list(range(1, 2 * HOT, 2))
