"""The drafter's learner has the right gradient, resumes exactly and refuses wrong states."""

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.trainer.drafters import (
    LAYOUTS,
    VOCABULARY,
    decoded,
    drafter,
    ends,
    learner,
    samples,
    whole,
)
from tests.trainer.models import copies
from tlt.errors import ConfigError
from tlt.models.eagle_drafter import Drafter, new_drafter
from tlt.trainer.drafter.drafter_learner import DrafterLearner
from tlt.trainer.drafter.hyperparameters import DrafterHyperparameters
from tlt.trainer.drafter.muon import MuonWithAdam, orthogonalise
from tlt.trainer.drafter.samples import DrafterSample
from tlt.trainer.policy.model import logprobs

STEPS = 3
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def gradient(learns: DrafterLearner, chosen: list[DrafterSample]) -> dict[str, Tensor]:
    """Compute the gradient from the first moment after one step, a twentieth or tenth of it."""
    learns.learn(whole(chosen, STEPS))
    state = learns.state()
    return {
        name: state[f"optimiser.{name}.first"] * (20 if mean.dim() == 2 else 10)
        for name, mean in learns.drafter().named_parameters()
    }


def naive_loss(made: Drafter, chosen: list[DrafterSample], fading: float) -> Tensor:
    """Compute the loss chain by chain with all logits."""
    head, losses, weights = ends().head, [], []
    for sample in chosen:
        for row in range(max(0, sample.prompt - 2), sample.rows):
            for step, readout in enumerate(decoded(made, sample, row, STEPS)):
                aims = F.linear(sample.states[row + step + 1, -1], head).softmax(-1)
                found = made.logits(readout, head).log_softmax(-1)
                losses.append(-(aims * found).sum() * fading**step)
                weights.append(fading**step)
    return torch.stack(losses).sum() / sum(weights)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_chains_give_the_gradient_of_separate_chains(layout: str):
    chosen = samples(layout, 4)
    learns = learner(layout, steps=STEPS, step_discount=0.7)
    sizes = learns.state()["optimiser.fc.weight.sizes"]
    found = gradient(learns, chosen)
    made = drafter(layout)
    slopes = torch.autograd.grad(naive_loss(made, chosen, 0.7), list(made.parameters()))
    for (name, _), slope in zip(made.named_parameters(), slopes, strict=True):
        expected = slope / sizes if name == "fc.weight" else slope
        torch.testing.assert_close(found[name], expected, **CLOSE)


def test_chunked_vocabulary_gives_the_same_gradient(monkeypatch: pytest.MonkeyPatch):
    chosen = samples("eagle3", 4)
    at_once = gradient(learner("eagle3", own_head=12), chosen)
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", VOCABULARY * 7)
    for name, tensor in gradient(learner("eagle3", own_head=12), chosen).items():
        torch.testing.assert_close(at_once[name], tensor, **CLOSE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resumed_learner_continues_to_the_bit(layout: str):
    batches = [whole(samples(layout, 3, seed, torch.float32), STEPS) for seed in range(6)]
    steady = learner(layout, torch.float32)
    for batch in batches[:3]:
        steady.learn(batch)
    kept = copies(steady.state())
    resumed = learner(layout, torch.float32)
    resumed.load(kept)
    for batch in batches[3:]:
        assert steady.learn(batch) == resumed.learn(batch)
    theirs = resumed.state()
    assert steady.state().keys() == theirs.keys()
    for name, tensor in steady.state().items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf")])
def test_skips_an_update_that_is_not_finite(spoilt: float):
    learns = learner("eagle")
    good, bad = samples("eagle", 2), samples("eagle", 2)
    learns.learn(whole(good, STEPS))
    before = copies(learns.state())
    bad[0].states[-1] = spoilt
    assert learns.learn(whole(bad, STEPS)).skipped
    after = learns.state()
    assert int(after.pop("skipped")) == int(before.pop("skipped")) + 1
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    assert not learns.learn(whole(good, STEPS)).skipped


def test_learns_and_returns_the_mean_of_its_weights():
    chosen = whole(samples("eagle", 6), STEPS)
    learns = learner("eagle", steps=STEPS)
    first = learns.learn(chosen)
    for _ in range(60):
        last = learns.learn(chosen)
    assert last.loss < 0.8 * first.loss
    assert min(last.overlap) > max(first.overlap)
    state = learns.state()
    for name, tensor in learns.drafter().named_parameters():
        assert torch.equal(tensor, state[f"mean.{name}"])
        assert not torch.equal(tensor, state[f"weights.{name}"])


def test_refuses_the_state_of_another_drafter_by_name():
    with pytest.raises(ConfigError, match="drafter lacks midlayer"):
        learner("eagle3").load(learner("eagle").state())
    wide = learner("eagle3", own_head=12)
    with pytest.raises(ConfigError, match=r"lm_head.weight of shape \(10, 16\)"):
        wide.load(learner("eagle3", own_head=10).state())


def test_orthogonalise_moves_all_directions_equally():
    matrix = torch.randn(24, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for shaped in (matrix, matrix.T):
        values = torch.linalg.svdvals(orthogonalise(shaped))
        assert values.min() > 0.6
        assert values.max() < 1.3


def test_known_input_sizes_change_nothing_in_the_products():
    """Inputs `sizes` times as large with weights as much smaller give the same products."""
    sizes = torch.tensor([0.1, 1.0, 30.0], dtype=torch.float64)
    inputs = torch.randn(9, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    products: list[Tensor] = []
    for scale in (torch.ones_like(sizes), sizes):
        weight = (torch.eye(3, dtype=torch.float64) / scale).requires_grad_()
        optimiser = MuonWithAdam({"weight": weight}, {"weight": scale})
        for _ in range(5):
            loss = ((inputs * scale) @ weight.T).square().sum()
            (slope,) = torch.autograd.grad(loss, weight)
            optimiser.step({"weight": slope}, 0.05, 0.0)
        products.append((inputs * scale) @ weight.detach().T)
    torch.testing.assert_close(*products)


def test_rates_rise_then_stay_then_fall_to_a_limit():
    recipe = DrafterHyperparameters(
        warmup=4, decay_start=10, lowest_factor=0.25, matrix_rate=1.0, vector_rate=0.5
    )
    rates = [recipe.rates(update, update) for update in range(1000)]
    assert rates[0] == (0.25, 0.125)
    assert rates[3] == rates[9] == (1.0, 0.5)
    assert rates[39] == (0.5, 0.25)
    assert rates[999] == (0.25, 0.125)
    taught = DrafterHyperparameters(
        warmup=4, decay_start=10, lowest_factor=0.25, past=30, matrix_rate=1.0, vector_rate=0.5
    )
    assert taught.rates(0, 0) == (0.25, 0.125)
    assert taught.rates(9, 9) == (0.5, 0.25)
    # a member with fresh moments, on a base that others trained
    assert recipe.rates(39, 0) == (0.25, 0.125)
    assert recipe.rates(42, 3) == recipe.rates(42, 42)
    assert taught.rates(9, 9, members=4) == (1.0, 0.5)
    assert taught.rates(9, 9, members=9) == (1.0, 0.5)


def test_mean_starts_with_the_first_weights_and_covers_ever_more_updates():
    recipe = DrafterHyperparameters(mean_part=0.1, longest_mean=50)
    assert recipe.mean_weight(1) == 1.0
    assert recipe.mean_weight(40) == 1 / 5
    assert recipe.mean_weight(500) == recipe.mean_weight(9000) == 1 / 51


def test_accepts_answers_beyond_the_declared_positions():
    """Published drafters declare 2,048 positions, whatever their policy's context is."""
    chosen, length = samples("eagle3", 1)[0], 3
    made = drafter("eagle3")
    short = new_drafter(msgspec.structs.replace(made.config, max_positions=length))
    short.to(torch.float64).load_state_dict(made.state_dict())
    assert chosen.rows > length
    row = chosen.rows - 1
    for found, expected in zip(
        decoded(short, chosen, row, STEPS), decoded(made, chosen, row, STEPS), strict=True
    ):
        assert torch.equal(found, expected)
