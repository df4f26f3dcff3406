"""Weights that policy.freeze names stay as they are, and have neither gradients nor moments."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer.models import (
    CPU,
    PATHS,
    copies,
    learner,
    never_interrupt,
    samples,
    save_llama,
    spec,
    whole,
)
from tlt.errors import ConfigError
from tlt.trainer.policy.model.trained_part import TrainedPart
from tlt.trainer.policy.policy_learner import PolicyLearner

FREEZE = ("model.embed_tokens.*", "*norm.weight", "model.layers.0.*")


def frozen(folder: str, *freeze: str, **changes: Any) -> PolicyLearner:
    settings = spec(**{"attention": "padded"} | changes)
    part = TrainedPart(freeze=freeze or FREEZE)
    return PolicyLearner(folder, settings, None, CPU, part=part)


@pytest.mark.parametrize("attention", PATHS)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "checkpointed"])
def test_the_rest_learns_what_it_would_learn(
    model_dir: str, attention: str, checkpointing: bool
) -> None:
    """Compare first moments of unclipped gradients, which depend on no other weight's step."""
    changes: dict[str, Any] = {"gradient_clip": 1e6, "kl_coefficient": 0.1}
    ours = {"attention": attention, "gradient_checkpointing": checkpointing}
    some, everything = frozen(model_dir, **changes | ours), learner(model_dir, **changes)
    before = copies(dict(some.weights()))
    parts = [whole(samples(6))]
    for learns in (some, everything):
        learns.update(0, parts, None, never_interrupt)
    kept = {n for n in before if torch.equal(some.weights()[n], before[n])}
    fixed = {n for n in before if ".layers.1." not in n or "norm" in n}
    assert kept == fixed
    assert some.optimiser_state().keys() - {"step"} == {
        f"{name}.{moment}" for name in before.keys() - fixed for moment in ("exp_avg", "exp_avg_sq")
    }
    for name in before.keys() - fixed:
        moment = some.optimiser_state()[f"{name}.exp_avg"]
        expected = everything.optimiser_state()[f"{name}.exp_avg"]
        torch.testing.assert_close(moment, expected, rtol=1e-3, atol=1e-6)


def test_saved_state_continues_to_the_bit(model_dir: str, tmp_path: Path) -> None:
    first, second = frozen(model_dir), frozen(model_dir)
    first.update(0, [whole(samples(5)), whole(samples(5, seed=1))], None, never_interrupt)
    save_file(dict(first.weights()), tmp_path / "weights.safetensors")
    save_file(first.optimiser_state(), tmp_path / "optimiser.safetensors")
    second.load_weights(load_file(tmp_path / "weights.safetensors"))
    second.load_optimiser_state(load_file(tmp_path / "optimiser.safetensors"))
    for learns in (first, second):
        learns.update(1, [whole(samples(6, seed=2))], None, never_interrupt)
    for one, other in (
        (first.weights(), second.weights()),
        (first.optimiser_state(), second.optimiser_state()),
    ):
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize(
    ("freeze", "complaint"),
    [
        (("*.bias",), r"\*\.bias matches no weight"),
        (("model.norm.weight", "lm_head.weight"), "lm_head.weight matches no weight"),
        (("model.*",), "leaves no weight"),
    ],
)
def test_refuses_patterns_that_make_no_sense(
    tmp_path: Path, freeze: tuple[str, ...], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        frozen(save_llama(tmp_path), *freeze)
