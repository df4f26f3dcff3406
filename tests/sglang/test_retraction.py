"""SGLang retracts answers where its cache is too small for all, and reads them again: none is lost.

Its memory here is that of 8 answers, and 32 may decode at once.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engine import drafter_models
from tests.engine.reference import (
    answers,
    finish,
    forced_logits,
    greedy_answer,
    logprobs_of,
    new_request,
    random_prompts,
)
from tests.sglang.speculating import (
    ARMS,
    CHAIN,
    CONTEXT,
    FIRST,
    NGRAM,
    Memoryless,
    check_frequencies,
    check_greedy,
    check_proposals,
    draw,
    finish_tallies,
    last_state_error,
    origins,
    proposals,
    requests,
    start,
)
from tlt.base.id_types import PolicyVersion
from tlt.base.strategies import Off, max_drafts
from tlt.engine.base import Completion, Request, Sampling
from tlt.engine.sglang.client.engine import SglangEngine
from tlt.errors import ConfigError
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.eagle_drafter import Drafter

pytestmark = pytest.mark.sglang

SLOTS, MEMORY = 32, 8
# with room for drafts
POSITIONS = CONTEXT + 2 * (max(map(max_drafts, ARMS)) + 1)


@pytest.fixture(scope="module")
def small(policy: Path, folder: Path) -> Iterator[SglangEngine]:
    """Yield an engine whose drafter's cache lapses now and then."""
    script = [(NGRAM, 12), (CHAIN, 12), (Off(), 32), (CHAIN, 12)]
    with pytest.MonkeyPatch.context() as patch:
        # SGLang expects no answer to become longer, as it does of 4,096 tokens by default
        patch.setenv("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", "16")
        cache = MEMORY * POSITIONS
        engine = start(folder, policy, "eagle", script, slots=SLOTS, cache_tokens=cache)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def _cold(small: SglangEngine, policy: Path) -> None:
    small.swap_weights(PolicyVersion(small.version + 1), dict(load_decoder(policy).weights))
    small.drop_drafter()
    finish_tallies(small)


def retractions(done: dict[int, Completion]) -> int:
    return sum(completion.retractions for completion in done.values())


def check_logprobs(policy: Path, submitted: list[Request], done: dict[int, Completion]) -> None:
    for request in submitted:
        answer = done[request.id]
        logits = forced_logits(policy, request.prompt, answer.tokens)
        expected = logprobs_of(logits, answer.tokens, request.sampling.temperature or 1.0)
        assert torch.tensor(answer.logprobs).sub(expected).abs().max() < 1e-3


def sampled(count: int, tokens: int = 100) -> list[Request]:
    prompts = random_prompts(count // 2, shortest=4)
    return [new_request(i, prompts[i // 2], Sampling(), tokens) for i in range(count)]


def test_retracted_answers_keep_tokens_logprobs_and_states(
    small: SglangEngine, policy: Path
) -> None:
    submitted = requests(64, tokens=100)
    small.submit(submitted)
    done: dict[int, Completion] = {}
    while small.running:
        for completion in small.step():
            assert completion.id not in done
            done[completion.id] = completion
            assert last_state_error(small, policy, submitted[completion.id], completion) < 1e-4
    assert retractions(done) > 0
    check_greedy(policy, submitted, done)
    for completion in done.values():
        assert sum(span.tokens for span in completion.policies) == len(completion.tokens) == 100
        assert {span.version for span in completion.policies} == {small.version}


def test_sampled_answers_have_their_policys_logprobs(
    small: SglangEngine, policy: Path, fitted: Drafter
) -> None:
    small.adopt_drafter(FIRST, fitted)
    submitted = sampled(48)
    done = answers(small, submitted)
    assert retractions(done) > 0
    assert origins(done)["accepted"] > 0
    check_logprobs(policy, submitted, done)


def test_the_drafters_cache_is_that_of_whole_texts_after_retractions(
    small: SglangEngine, policy: Path, folder: Path, fitted: Drafter
) -> None:
    known = len(proposals(folder))
    submitted = sampled(48)
    small.submit(submitted)
    done: dict[int, Completion] = {}
    while len(done) < 8:
        done |= {completion.id: completion for completion in small.step()}
    small.adopt_drafter(FIRST, fitted)
    done |= finish(small)
    assert retractions(done) > 0
    assert check_proposals(proposals(folder)[known:], submitted, done, fitted, policy) > 100


def test_a_swap_among_retracted_answers_leaves_right_versions(
    small: SglangEngine, policy: Path, tmp_path: Path
) -> None:
    other = drafter_models.turned_policy(policy, tmp_path / "other")
    first = small.version
    submitted = requests(64, tokens=100)
    small.submit(submitted)
    done: dict[int, Completion] = {}
    while len(done) < 8:
        done |= {completion.id: completion for completion in small.step()}
    second = PolicyVersion(first + 1)
    small.swap_weights(second, dict(load_decoder(other).weights))
    done |= finish(small)
    assert len(done) == len(submitted)
    assert retractions(done) > 0
    both = 0
    for request in submitted:
        spans = done[request.id].policies
        assert [span.version for span in spans] in ([first], [first, second], [second])
        assert sum(span.tokens for span in spans) == 100
        before = sum(span.tokens for span in spans if span.version == first)
        both += 0 < before < 100
        tokens = done[request.id].tokens
        assert tokens[:before] == greedy_answer(policy, request.prompt, 100)[:before]
        if before == 0:
            assert tokens == greedy_answer(other, request.prompt, 100)
    assert both > 0


@pytest.mark.parametrize("together", [SLOTS, 6], ids=["retracted", "never retracted"])
def test_tokens_follow_the_policy(
    small: SglangEngine, memoryless: Memoryless, together: int
) -> None:
    """The same test passes for as few answers at once that none is retracted."""
    small.swap_weights(PolicyVersion(small.version + 1), memoryless.weights)
    small.adopt_drafter(FIRST, memoryless.drafter)
    done = draw(small, together=together)
    assert (retractions(done) > 0) == (together == SLOTS)
    check_frequencies(done, memoryless.logits)


def test_refuses_a_cache_in_which_one_answer_has_no_room(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.cache_tokens: 137 tokens are fewer than the"):
        start(tmp_path, policy, "eagle", [(CHAIN, 16)], slots=SLOTS, cache_tokens=POSITIONS - 1)
