"""An answer changes where its noise selects another token, as often as two distributions imply."""

import math

import pytest
import torch

from benchmarks.answer_survival import Drawn, Forced, force, share_changed, survival
from tlt.base.id_types import Member, PromptIndex, Step
from tlt.engine.base import NoiseKey, Request, Sampling
from tlt.engine.native.gumbel_noise import GumbelNoise
from tlt.engine.native.token_sampler import Sampler

_NOISE = GumbelNoise(5, torch.device("cpu"))
_OLD = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
_NEW = torch.tensor([0.3, 0.3, 0.25, 0.1, 0.05])
_TOKENS = 400


def _request(member: int) -> Request:
    return Request(
        id=0,
        prompt=(1, 2, 3),
        key=NoiseKey(
            seed=1,
            step=Step(2),
            purpose="train",
            prompt=PromptIndex(4),
            member=Member(member),
        ),
        sampling=Sampling(),
        max_new_tokens=_TOKENS,
        stop_tokens=frozenset(),
    )


def _drawn(member: int) -> Drawn:
    """Draw an answer whose tokens all have the old distribution."""
    request = _request(member)
    sampler = Sampler([request], _NOISE, _OLD)
    noise = sampler.noise(3 + torch.arange(_TOKENS)[None])
    tokens, logprobs = sampler.draw(_OLD.log().expand(1, _TOKENS, -1), noise)
    return Drawn(request, tokens[0].tolist(), logprobs[0].tolist())


def _forced(probabilities: torch.Tensor, answers: int = 50) -> list[Forced]:
    logits = probabilities.log().expand(_TOKENS, -1)
    return [force(_drawn(member), logits, _NOISE) for member in range(answers)]


def test_nothing_changes_under_the_same_weights() -> None:
    for answer in _forced(_OLD, answers=3):
        assert list(answer.changed) == []
        assert answer.kept == answer.length == _TOKENS
        assert answer.total_variation == pytest.approx(0, abs=1e-3)


def test_counts_as_many_changes_as_the_distributions_imply() -> None:
    answers = _forced(_NEW)
    q, error = share_changed(answers)
    # with noise in common, both select i if no other j beats it under either distribution
    both = [
        1 / sum(max(_OLD[j] / _OLD[i], _NEW[j] / _NEW[i]).item() for j in range(5))
        for i in range(5)
    ]
    expected = 1 - sum(both)
    assert abs(q - expected) < 4 * error
    # positions are independent here, so that the error is that of a binomial share
    assert error == pytest.approx(math.sqrt(q * (1 - q) / (50 * _TOKENS)), rel=0.4)
    variation = sum(answer.total_variation for answer in answers) / (50 * _TOKENS)
    assert variation == pytest.approx((_OLD - _NEW).abs().sum().item() / 2, rel=0.05)


def test_keeps_what_comes_before_the_first_change() -> None:
    answers = [Forced(10, [4, 5], 0.0), Forced(10, [], 0.0), Forced(3, [0], 0.0)]
    assert [answer.kept for answer in answers] == [4, 10, 0]
    assert share_changed(answers)[0] == 3 / 23


def test_survival_is_the_mean_place_of_the_first_change() -> None:
    q, length = 0.1, 7
    places = [q * (1 - q) ** (place - 1) for place in range(1, length)]
    mean = sum(place * chance for place, chance in enumerate(places, start=1))
    assert survival(q, length) == pytest.approx(mean + length * (1 - sum(places)))
    assert (survival(0, length), survival(1, length)) == (length, 1)
