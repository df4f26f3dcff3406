"""What an update does with a micro-batch: its gradient, its state, its refusals."""

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
from tlt.trainer.policy import logprobs

STEPS = 3
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def gradient(learns: DrafterLearner, chosen: list[DrafterSample]) -> dict[str, Tensor]:
    """After one step from nothing, the first moment is the gradient's twentieth or tenth part."""
    learns.learn(whole(chosen, STEPS))
    state = learns.state()
    return {
        name: state[f"optimiser.{name}.first"] * (20 if mean.dim() == 2 else 10)
        for name, mean in learns.drafter().named_parameters()
    }


def naive_loss(made: Drafter, chosen: list[DrafterSample], fading: float) -> Tensor:
    """One chain after the other, all logits; a mean whose later steps weigh less."""
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
def test_a_packed_gradient_is_that_of_one_chain_after_the_other(layout: str):
    chosen = samples(layout, 4)
    learns = learner(layout, steps=STEPS, step_discount=0.7)
    sizes = learns.state()["optimiser.fc.weight.sizes"]
    found = gradient(learns, chosen)
    made = drafter(layout)
    slopes = torch.autograd.grad(naive_loss(made, chosen, 0.7), list(made.parameters()))
    for (name, _), slope in zip(made.named_parameters(), slopes, strict=True):
        expected = slope / sizes if name == "fc.weight" else slope
        torch.testing.assert_close(found[name], expected, **CLOSE)


def test_a_vocabulary_in_chunks_gives_the_same_gradient(monkeypatch: pytest.MonkeyPatch):
    chosen = samples("eagle3", 4)
    at_once = gradient(learner("eagle3", own_head=12), chosen)
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", VOCABULARY * 7)
    for name, tensor in gradient(learner("eagle3", own_head=12), chosen).items():
        torch.testing.assert_close(at_once[name], tensor, **CLOSE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_learner_goes_on_to_the_bit(layout: str):
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
def test_what_is_not_finite_changes_nothing_but_a_count(spoilt: float):
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


def test_it_learns_and_the_mean_of_its_weights_is_what_is_used():
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


def test_the_state_of_another_drafter_is_refused_by_name():
    with pytest.raises(ConfigError, match="drafter lacks midlayer"):
        learner("eagle3").load(learner("eagle").state())
    wide = learner("eagle3", own_head=12)
    with pytest.raises(ConfigError, match=r"lm_head.weight of shape \(10, 16\)"):
        wide.load(learner("eagle3", own_head=10).state())


def test_an_orthogonal_update_moves_all_directions_alike():
    matrix = torch.randn(24, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for shaped in (matrix, matrix.T):
        values = torch.linalg.svdvals(orthogonalise(shaped))
        assert values.min() > 0.6
        assert values.max() < 1.3


def test_the_size_of_inputs_changes_nothing_once_it_is_known():
    """Inputs `sizes` times as large, weights as much smaller: the products stay the same."""
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


def test_rates_rise_stay_and_fall_to_a_part():
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
    # a member whose moments are fresh, on a trunk that others made
    assert recipe.rates(39, 0) == (0.25, 0.125)
    assert recipe.rates(42, 3) == recipe.rates(42, 42)


def test_the_mean_begins_with_the_first_weights_and_reaches_back_further_and_further():
    recipe = DrafterHyperparameters(mean_part=0.1, longest_mean=50)
    assert recipe.mean_weight(1) == 1.0
    assert recipe.mean_weight(40) == 1 / 5
    assert recipe.mean_weight(500) == recipe.mean_weight(9000) == 1 / 51


def test_answers_may_be_longer_than_what_a_drafter_says_it_was_made_for():
    """Published ones name 2,048 positions, whatever their policy's context is."""
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
