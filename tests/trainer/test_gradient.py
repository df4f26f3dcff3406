"""The gradient that reaches the optimiser equals the naive reference's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer import reference
from tests.trainer.models import PATHS, learner, never_interrupt, samples, save_family, spec, whole
from tlt.trainer.policy.model import logprobs
from tlt.trainer.policy.model.micro_batches import PolicySample

LOOSE = 1e9


def gradient(folder: str, chosen: list[PolicySample], **changes: Any) -> dict[str, Tensor]:
    """Read the gradient from Adam's first moment after one step: (1 - beta) times as large."""
    changes = {"gradient_clip": LOOSE} | changes
    learns = learner(folder, **changes)
    learns.update(0, [whole(chosen)], None, never_interrupt)
    state = learns.optimiser_state()
    factor = 1.0 - spec(**changes).betas[0]
    return {name: state[f"{name}.exp_avg"] / factor for name in learns.weights()}


def expected(folder: str, chosen: list[PolicySample], **changes: Any) -> dict[str, Tensor]:
    model = reference.load(folder)
    algorithm = spec(**changes)
    with torch.no_grad():
        old = [reference.logprobs(model, sample)[0] for sample in chosen]
    frozen = reference.load(folder) if algorithm.kl_coefficient > 0 else None
    reference.loss(algorithm, model, chosen, old, frozen).backward()
    return {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("attention", PATHS)
@pytest.mark.parametrize("averaging", ["token", "sequence"])
def test_the_gradient_is_that_of_the_naive_loss(model_dir: str, averaging: str, attention: str):
    ours = gradient(model_dir, samples(9), averaging=averaging, attention=attention)
    theirs = expected(model_dir, samples(9), averaging=averaging)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("attention", PATHS)
@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_batching_does_not_change_the_gradient(model_dir: str, budget: int, attention: str):
    chosen = samples(9)
    ours = gradient(model_dir, chosen, microbatch_tokens=budget, attention=attention)
    for name, tensor in gradient(model_dir, chosen[::-1], microbatch_tokens=77).items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("attention", PATHS)
def test_gradient_checkpointing_gives_the_same_gradient(model_dir: str, attention: str):
    plain = gradient(model_dir, samples(6), attention=attention)
    again = gradient(model_dir, samples(6), attention=attention, gradient_checkpointing=True)
    for name, tensor in again.items():
        torch.testing.assert_close(plain[name], tensor)


@pytest.mark.parametrize("family", ["opt", "biogpt", "xglm"])
def test_gradient_checkpointing_enables_no_dropout(tmp_path: Path, family: str):
    sizes = {"ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "word_embed_proj_dim": 32}
    if family == "xglm":
        sizes["d_model"] = 32
    folder = save_family(tmp_path, family, **sizes, initializer_range=0.2, activation_dropout=0.1)
    plain = gradient(folder, samples(6))
    again = gradient(folder, samples(6), gradient_checkpointing=True)
    for name, tensor in again.items():
        torch.testing.assert_close(plain[name], tensor)


def test_chunked_vocabulary_gives_the_same_gradient(
    model_dir: str, monkeypatch: pytest.MonkeyPatch
):
    at_once = gradient(model_dir, samples(6))
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", 24 * 7)
    for name, tensor in gradient(model_dir, samples(6)).items():
        torch.testing.assert_close(at_once[name], tensor, rtol=1e-4, atol=1e-6)


def test_temperature_changes_the_gradient_as_in_the_naive_loss(model_dir: str):
    hot = [replace(sample, temperature=1.7) for sample in samples(4)]
    mixed = hot + samples(4, seed=1)
    theirs = expected(model_dir, mixed)
    for name, tensor in gradient(model_dir, mixed).items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("attention", PATHS)
def test_bfloat16_points_the_same_way(model_dir: str, attention: str):
    def flat(precision: str) -> Tensor:
        found = gradient(model_dir, samples(20), precision=precision, attention=attention)
        return torch.cat([tensor.flatten() for tensor in found.values()])

    similarity = torch.cosine_similarity(flat("float32"), flat("bfloat16"), dim=0)
    assert similarity > 0.99
