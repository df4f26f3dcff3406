"""Strategies, tap and rebuilt caches are right where SGLang's results come one pass late.

That is its `event_loop_overlap`, which it has for GPUs. On a CPU it runs, too, if told to: each
pass is over once it is launched, but its result is looked at after the next one.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import drafter_models
from tests.engine.chi_square import p_value
from tests.engine.drafter_models import policy_states
from tests.engine.reference import answers, greedy_answer, new_request, random_prompts
from tests.engine.test_sampled_distribution import TRIALS
from tests.sglang.speculating import (
    CHAIN,
    FIRST,
    NGRAM,
    check_greedy,
    check_proposals,
    drafters,
    finish_tallies,
    origins,
    proposals,
    requests,
    start,
)
from tlt.base.id_types import PolicyVersion
from tlt.base.strategies import Off
from tlt.engine.base import Completion, Sampling
from tlt.engine.sglang.client.engine import SglangEngine
from tlt.engine.sglang.client.process_state_guard import restore_process_state
from tlt.engine.sglang.cpu import cpu_mode
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.eagle_drafter import Drafter

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drafter_models.predictable_policy(tmp_path_factory.mktemp("policy") / "policy")


@pytest.fixture(scope="module")
def fitted(policy: Path) -> Drafter:
    return drafter_models.fitted_drafter("eagle", policy)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("late")


@pytest.fixture(scope="module")
def engine(policy: Path, folder: Path) -> Iterator[SglangEngine]:
    """Yield an engine whose drafter's cache lapses before each time that it is used."""
    with restore_process_state(cpu_mode.environment(1)):
        cpu_mode.enter()
        from sglang.srt.arg_groups import speculative_hook
    script = [(NGRAM, 20), (CHAIN, 8), (Off(), 32), (CHAIN, 8)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculative_hook, "_disable_overlap_schedule_for_cpu", lambda _: None)
        started = start(folder, policy, "eagle", script)
    client: Any = vars(started)["_client"]
    assert not vars(client)["_engine"].server_args.disable_overlap_schedule
    yield started
    started.close()


@pytest.fixture(autouse=True)
def _cold(engine: SglangEngine) -> None:
    engine.drop_drafter()
    finish_tallies(engine)


def test_greedy_answers_stay_while_a_drafter_is_adopted_and_strategies_take_turns(
    engine: SglangEngine, policy: Path, fitted: Drafter
) -> None:
    submitted = requests(40, tokens=100)
    engine.submit(submitted)
    done: dict[int, Completion] = {}
    while len(engine.partial_answer(0) or ()) < 10:
        done |= {completion.id: completion for completion in engine.step()}
    engine.adopt_drafter(FIRST, fitted)
    while engine.running:
        done |= {completion.id: completion for completion in engine.step()}
    check_greedy(policy, submitted, done)
    tallies = finish_tallies(engine)
    assert {NGRAM, CHAIN, Off()} <= {tally.strategy for tally in tallies}
    # all but the first token of each answer, which its prefill gains
    assert sum(tally.tokens for tally in tallies) == sum(len(d.tokens) - 1 for d in done.values())
    assert origins(done)["accepted"] > 300
    assert drafters(done) == {None, FIRST}


def test_a_cache_that_lapsed_is_rebuilt(
    engine: SglangEngine, policy: Path, folder: Path, fitted: Drafter
) -> None:
    engine.adopt_drafter(FIRST, fitted)
    known = len(proposals(folder))
    submitted = [
        new_request(i, prompt, Sampling(), 100) for i, prompt in enumerate(random_prompts(48))
    ]
    done = answers(engine, submitted)
    assert check_proposals(proposals(folder)[known:], submitted, done, fitted, policy) > 100


def test_the_tap_holds_the_states_of_each_token(
    engine: SglangEngine, policy: Path, fitted: Drafter
) -> None:
    engine.adopt_drafter(FIRST, fitted)
    submitted = {r.id: r for r in requests(24, tokens=50)}
    engine.submit(list(submitted.values()))
    seen = 0
    while engine.running:
        for completion in engine.step():
            text = [*submitted[completion.id].prompt, *completion.tokens][:-1]
            wanted = policy_states(policy, torch.tensor([text]))[0][0][:, -1]
            states = engine.hidden_states(completion.id)[:, 0]
            assert states.shape == wanted.shape
            assert ((states - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max() < 1e-5
            seen += 1
    assert seen == 24


def test_a_swap_in_mid_answer_keeps_each_versions_tokens_apart(
    engine: SglangEngine, policy: Path, fitted: Drafter, tmp_path: Path
) -> None:
    """Neither policy's tokens depend on the text, so that each shows which one drew it."""
    versions = [PolicyVersion(engine.version + n) for n in (1, 2, 3)]
    best = {versions[0]: 7, versions[1]: 8}
    weights = []
    for token in best.values():
        logits = torch.zeros(97)
        logits[token] = 9.0
        drafter_models.memoryless_policy(tmp_path / str(token), logits)
        weights.append(dict(load_decoder(tmp_path / str(token)).weights))
    engine.swap_weights(versions[0], weights[0])
    engine.adopt_drafter(FIRST, fitted)
    submitted = requests(8, tokens=100)
    engine.submit(submitted)
    done: dict[int, Completion] = {}
    while len(engine.partial_answer(7) or ()) < 30:
        done |= {completion.id: completion for completion in engine.step()}
    engine.swap_weights(versions[1], weights[1])
    while engine.running:
        done |= {completion.id: completion for completion in engine.step()}
    engine.swap_weights(versions[2], dict(load_decoder(policy).weights))
    for completion in done.values():
        said = [version for span in completion.policies for version in [span.version] * span.tokens]
        assert set(said) == set(versions[:2])
        assert completion.tokens == [best[version] for version in said]


def test_tokens_follow_the_policy(engine: SglangEngine, tmp_path: Path, policy: Path) -> None:
    logits = 1.5 * torch.randn(97, generator=torch.Generator().manual_seed(3))
    logits[5] = 5.0
    state = drafter_models.memoryless_policy(tmp_path / "policy", logits)
    weights = dict(load_decoder(tmp_path / "policy").weights)
    engine.swap_weights(PolicyVersion(engine.version + 1), weights)
    engine.adopt_drafter(FIRST, drafter_models.constant_drafter(state))
    count = -(-TRIALS["sglang"].draws // 98)
    prompt = random_prompts(1, shortest=5)[0]
    done = answers(
        engine, [new_request(i, prompt, Sampling(temperature=0.7), 98) for i in range(count)]
    )
    engine.swap_weights(PolicyVersion(engine.version + 1), dict(load_decoder(policy).weights))
    drawn = torch.tensor([token for completion in done.values() for token in completion.tokens])
    expected = (logits / 0.7).softmax(-1)
    assert p_value(drawn.bincount(minlength=97), expected) > TRIALS["sglang"].significance
    assert origins(done)["accepted"] > 1000


def test_stop_tokens_end_answers_where_the_next_pass_has_begun(
    engine: SglangEngine, policy: Path, fitted: Drafter
) -> None:
    engine.adopt_drafter(FIRST, fitted)
    prompts = random_prompts(30)
    done = answers(
        engine,
        [new_request(i, p, stop_tokens=[40, 41], max_new_tokens=60) for i, p in enumerate(prompts)],
    )
    for i, prompt in enumerate(prompts):
        whole = greedy_answer(policy, prompt, 60)
        ends = [place for place, token in enumerate(whole) if token in (40, 41)]
        assert done[i].tokens == whole[: ends[0] + 1 if ends else None]
