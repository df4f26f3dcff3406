"""Draws follow the distribution; a filtered token is never drawn."""

from pathlib import Path

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.engine.conftest import MakeEngine
from tests.engine.oracle import answers, ask, forced_logits, logprobs_of
from tlt.engine.base import Engine, Sampling

PROMPT = (3, 14, 15, 92, 65)


def drawn(engine: Engine, sampling: Sampling, members: int) -> torch.Tensor:
    """How often each token came first."""
    requests = [ask(i, PROMPT, sampling, max_new_tokens=1) for i in range(members)]
    tokens = [c.tokens[0] for c in answers(engine, requests).values()]
    return torch.tensor(tokens).bincount(minlength=97)


@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_frequencies_match_the_softmax(
    make_engine: MakeEngine, folder: Path, temperature: float
) -> None:
    members = 6000
    counts = drawn(make_engine(folder, slots=64), Sampling(temperature=temperature), members)
    expected = (forced_logits(folder, PROMPT, [0])[0] / temperature).softmax(-1) * members
    common = expected >= 5
    counts = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(expected) - 1.0)
    assert len(expected) > 10
    assert torch.special.gammaincc(freedom / 2, chi_square / 2) > 0.01


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(top_k=1),
        Sampling(top_k=6),
        Sampling(temperature=1.5, top_p=0.6),
        Sampling(temperature=1.5, min_p=0.1),
        Sampling(temperature=2.0, top_k=20, top_p=0.8, min_p=0.03),
    ],
)
def test_filters_leave_what_transformers_leaves(
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
    # a sibling without filters in the same batch
    requests = [ask(0, PROMPT, sampling), ask(1, PROMPT, Sampling())]
    done = answers(make_engine(folder), requests)[0]
    logits = forced_logits(folder, PROMPT, done.tokens)
    assert done.logprobs == pytest.approx(logprobs_of(logits, done.tokens, 0.8).tolist(), abs=1e-4)
    best = logits.topk(3).indices
    assert (best == torch.tensor(done.tokens)[:, None]).any(-1).all()
