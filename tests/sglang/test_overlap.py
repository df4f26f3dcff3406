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
from tests.engine.reference import answers, finish, greedy_answer, new_request, random_prompts
from tests.sglang.speculating import (
    CHAIN,
    FIRST,
    NGRAM,
    Memoryless,
    check_adoption_in_mid_answer,
    check_frequencies,
    check_rebuilt_cache,
    decode_until,
    draw,
    finish_tallies,
    last_state_error,
    origins,
    requests,
    start,
    swapped,
)
from tlt.base.id_types import PolicyVersion
from tlt.base.strategies import Off
from tlt.engine.sglang.client.engine import SglangEngine
from tlt.engine.sglang.client.process_state_guard import restore_process_state
from tlt.engine.sglang.cpu import cpu_mode
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.eagle_drafter import Drafter

pytestmark = pytest.mark.sglang


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
    check_adoption_in_mid_answer(engine, policy, fitted)


def test_a_cache_that_lapsed_is_rebuilt(
    engine: SglangEngine, policy: Path, folder: Path, fitted: Drafter
) -> None:
    check_rebuilt_cache(engine, policy, folder, fitted)


def test_the_tap_holds_the_states_of_each_token(
    engine: SglangEngine, policy: Path, fitted: Drafter
) -> None:
    engine.adopt_drafter(FIRST, fitted)
    submitted = {r.id: r for r in requests(24, tokens=50)}
    engine.submit(list(submitted.values()))
    seen = 0
    while engine.running:
        for completion in engine.step():
            assert last_state_error(engine, policy, submitted[completion.id], completion) < 1e-5
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
    done = decode_until(engine, 7, 30)
    engine.swap_weights(versions[1], weights[1])
    done |= finish(engine)
    engine.swap_weights(versions[2], dict(load_decoder(policy).weights))
    for completion in done.values():
        said = [version for span in completion.policies for version in [span.version] * span.tokens]
        assert set(said) == set(versions[:2])
        assert completion.tokens == [best[version] for version in said]


def test_tokens_follow_the_policy(
    engine: SglangEngine, policy: Path, memoryless: Memoryless
) -> None:
    with swapped(engine, policy, memoryless.weights):
        engine.adopt_drafter(FIRST, memoryless.drafter)
        done = draw(engine, temperature=0.7)
    check_frequencies(done, memoryless.logits, temperature=0.7)
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
