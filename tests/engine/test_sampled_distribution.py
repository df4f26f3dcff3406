"""Draws follow the distribution, and filtered tokens are never drawn."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.engine.chi_square import hardest_to_see, p_value, power
from tests.engine.conftest import MakeEngine
from tests.engine.reference import answers, forced_logits, logprobs_of, new_request
from tlt.engine.base import Engine, Sampling
from tlt.engine.native.gumbel_noise import GumbelNoise

PROMPT = (3, 14, 15, 92, 65)


def drawn(engine: Engine, sampling: Sampling, members: int) -> torch.Tensor:
    """Count how often each token came first."""
    requests = [new_request(i, PROMPT, sampling, max_new_tokens=1) for i in range(members)]
    tokens = [c.tokens[0] for c in answers(engine, requests).values()]
    return torch.tensor(tokens).bincount(minlength=97)


def first_token(folder: Path, temperature: float) -> torch.Tensor:
    return (forced_logits(folder, PROMPT, [0])[0] / temperature).softmax(-1)


class Trial(NamedTuple):
    """The number of draws that reveals this total variation with a power of 0.95."""

    draws: int
    variation: float
    significance: float


TRIALS = {
    "native": Trial(22_500, 0.03, 0.01),
    # its draws have no fixed seed, so a failure by chance must be very rare
    "sglang": Trial(12_500, 0.05, 1e-6),
}


@pytest.mark.parametrize("trial", TRIALS.values(), ids=TRIALS)
def test_draws_suffice_to_find_a_small_bias(trial: Trial) -> None:
    assert power(trial.draws, trial.variation, 97, trial.significance) >= 0.95


# SGLang's are tested in tests/sglang/test_speculation.py, with every way of guessing
@pytest.mark.needs("token_identical")
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_frequencies_match_the_softmax(
    make_engine: MakeEngine, folder: Path, temperature: float
) -> None:
    trial = TRIALS["native"]
    counts = drawn(make_engine(folder, slots=64), Sampling(temperature=temperature), trial.draws)
    assert p_value(counts, first_token(folder, temperature)) > trial.significance


@pytest.mark.needs("token_identical")
def test_detects_a_small_bias(
    make_engine: MakeEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws, variation, significance = TRIALS["native"]
    fair = first_token(folder, 1.0)
    biased = hardest_to_see(fair, variation)
    assert (biased - fair).abs().sum() / 2 == pytest.approx(variation, rel=0.05)
    plain = GumbelNoise.gumbel

    def loaded(self: GumbelNoise, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return plain(self, keys, positions) + (biased / fair).log()

    monkeypatch.setattr(GumbelNoise, "gumbel", loaded)
    counts = drawn(make_engine(folder, slots=64), Sampling(), draws)
    assert p_value(counts, biased) > significance
    assert p_value(counts, fair) < significance


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(top_k=1),
        Sampling(top_k=6),
        Sampling(temperature=1.5, top_p=0.6),
        Sampling(temperature=1.5, min_p=0.1),
        pytest.param(
            Sampling(temperature=2.0, top_k=20, top_p=0.8, min_p=0.03),
            # SGLang's top-p still counts tokens that top-k removed
            marks=pytest.mark.needs("token_identical"),
        ),
    ],
)
def test_filters_keep_the_tokens_that_transformers_keeps(
    make_engine: MakeEngine, folder: Path, sampling: Sampling
) -> None:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    ids = torch.tensor([PROMPT])
    left = warpers(ids, forced_logits(folder, PROMPT, [0]).clone())[0].softmax(-1)
    members = 800
    counts = drawn(make_engine(folder, slots=32), sampling, members)
    assert not (counts[left == 0] > 0).any()
    assert (counts[left * members > 15] > 0).all()


def test_logprobs_are_those_before_the_filters(make_engine: MakeEngine, folder: Path) -> None:
    sampling = Sampling(temperature=0.8, top_k=3)
    # an unfiltered sibling in the same batch
    requests = [new_request(0, PROMPT, sampling), new_request(1, PROMPT, Sampling())]
    done = answers(make_engine(folder), requests)[0]
    logits = forced_logits(folder, PROMPT, done.tokens)
    assert done.logprobs == pytest.approx(logprobs_of(logits, done.tokens, 0.8).tolist(), abs=1e-4)
    best = logits.topk(3).indices
    assert (best == torch.tensor(done.tokens)[:, None]).any(-1).all()
