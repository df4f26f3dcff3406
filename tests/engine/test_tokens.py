"""Tokens and log-probs equal those of Transformers in any batch."""

from pathlib import Path

import pytest
import torch

from tests.engine.conftest import MakeEngine, save_model
from tests.engine.reference import (
    GREEDY,
    answers,
    forced_logits,
    greedy_answer,
    logprobs_of,
    new_request,
    random_prompts,
)
from tlt.engine.base import Sampling
from tlt.errors import UnsupportedModel


def test_greedy_tokens_equal_those_of_transformers(
    make_engine: MakeEngine, policy_folder: Path
) -> None:
    """Their log-probs equal those of a forced pass."""
    prompts = random_prompts(11)
    requests = [new_request(i, p, max_new_tokens=5 + 3 * (i % 7)) for i, p in enumerate(prompts)]
    drawn = [new_request(20 + i, p, Sampling()) for i, p in enumerate(prompts)]
    engine = make_engine(policy_folder, slots=4, dtype=torch.float32)
    done = answers(engine, [*requests, *drawn])
    for r in requests:
        assert done[r.id].tokens == greedy_answer(policy_folder, r.prompt, r.max_new_tokens)
        assert done[r.id].stop == "length"
    for r in drawn:
        answer = done[r.id].tokens
        expected = logprobs_of(forced_logits(policy_folder, r.prompt, answer), answer, 1.0)
        assert torch.tensor(done[r.id].logprobs) == pytest.approx(expected, abs=1e-4)


def test_supports_biases_in_every_projection(make_engine: MakeEngine, tmp_path: Path) -> None:
    folder = save_model(tmp_path, seed=3, attention_bias=True, mlp_bias=True)
    prompt = random_prompts(1, shortest=9)[0]
    try:
        engine = make_engine(folder)
    except UnsupportedModel as error:
        if "SGLang has no biases" in str(error):
            return  # refused, because SGLang would ignore the biases
        raise
    assert answers(engine, [new_request(0, prompt)])[0].tokens == greedy_answer(folder, prompt, 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_those_of_a_forced_pass(
    make_engine: MakeEngine, folder: Path, temperature: float, dtype: torch.dtype
) -> None:
    sampling = Sampling(temperature=temperature)
    requests = [new_request(i, p, sampling) for i, p in enumerate(random_prompts(7))]
    done = answers(make_engine(folder, slots=3, dtype=dtype), requests)
    for r in requests:
        answer = done[r.id].tokens
        expected = logprobs_of(forced_logits(folder, r.prompt, answer), answer, temperature or 1.0)
        assert torch.tensor(done[r.id].logprobs) == pytest.approx(expected, abs=1e-4)


def test_half_precision_is_close_to_transformers(make_engine: MakeEngine, folder: Path) -> None:
    requests = [new_request(i, p, Sampling()) for i, p in enumerate(random_prompts(7))]
    done = answers(make_engine(folder, dtype=torch.bfloat16), requests)
    errors = torch.cat(
        [
            torch.tensor(done[r.id].logprobs)
            - logprobs_of(forced_logits(folder, r.prompt, done[r.id].tokens), done[r.id].tokens, 1)
            for r in requests
        ]
    )
    assert errors.abs().mean() < 0.1


@pytest.mark.needs("token_identical")
def test_batch_size_does_not_change_tokens(make_engine: MakeEngine, folder: Path) -> None:
    kinds = [
        Sampling(),
        GREEDY,
        Sampling(temperature=0.7),
        Sampling(temperature=1.3, top_p=0.9),
        Sampling(top_k=7),
        Sampling(min_p=0.05),
    ]
    prompts = random_prompts(4, shortest=2)
    requests = [
        new_request(i, prompts[i // 3], kinds[i % len(kinds)], max_new_tokens=5 + i)
        for i in range(12)
    ]
    crowd = answers(make_engine(folder, slots=5), requests)
    alone = make_engine(folder, slots=1)
    for r in reversed(requests):
        again = answers(alone, [r])[r.id]
        assert again.tokens == crowd[r.id].tokens
        assert again.logprobs == pytest.approx(crowd[r.id].logprobs, abs=1e-9)


@pytest.mark.needs("token_identical")
def test_a_retry_repeats_its_tokens_and_another_member_differs(
    make_engine: MakeEngine, folder: Path
) -> None:
    engine = make_engine(folder)
    prompt = random_prompts(1, shortest=5)[0]
    first = answers(engine, [new_request(1, prompt, Sampling())])[1].tokens
    retry = answers(engine, [new_request(2, prompt, Sampling(), member=1)])[2].tokens
    sibling = answers(engine, [new_request(3, prompt, Sampling())])[3].tokens
    reseeded = answers(engine, [new_request(1, prompt, Sampling(), seed=8)])[1].tokens
    assert first == retry
    assert sibling != first
    assert reseeded != first


def test_long_rows_among_short_ones(make_engine: MakeEngine, folder: Path) -> None:
    prompts = random_prompts(11, shortest=2, longest=6)
    for position in (4, 9):
        prompts.insert(position, random_prompts(1, shortest=170, longest=170)[0])
    requests = [new_request(i, p, max_new_tokens=6) for i, p in enumerate(prompts)]
    done = answers(make_engine(folder, slots=13, max_context=200), requests)
    for r in requests:
        assert done[r.id].tokens == greedy_answer(folder, r.prompt, 6)


def test_siblings_share_a_prefill_and_keep_their_tokens(
    make_engine: MakeEngine, folder: Path
) -> None:
    prompt = random_prompts(1, shortest=12)[0]
    requests = [new_request(i, prompt, max_new_tokens=3 + 2 * i) for i in range(9)]
    done = answers(make_engine(folder, slots=3), requests)
    whole = greedy_answer(folder, prompt, 19)
    assert [done[i].tokens for i in range(9)] == [whole[: 3 + 2 * i] for i in range(9)]
