"""Two ranks that hold half of each weight decode as one does, whatever their first rank chooses."""

import os
import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import save_model
from tests.engine.reference import GREEDY, answers, new_request, random_prompts
from tests.sglang.speculating import (
    CHAIN,
    FIRST,
    NGRAM,
    Memoryless,
    check_adoption_in_mid_answer,
    check_frequencies,
    check_greedy,
    check_rebuilt_cache,
    draw,
    origins,
    start,
    swapped,
)
from tlt.base.id_types import PolicyVersion
from tlt.base.strategies import Off
from tlt.engine.sglang.client.engine import SglangEngine
from tlt.engine.sglang.client.scheduler_process import SchedulerGroup, SchedulerProcess
from tlt.engine.sglang.client.weight_parts_and_checksums import drafter_as_held
from tlt.errors import RankError
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.eagle_drafter import Drafter

pytestmark = pytest.mark.sglang

# any cores for both
TWO = ((), ())


@pytest.fixture(scope="module")
def engine(policy: Path, folder: Path) -> Iterator[SglangEngine]:
    """Yield an engine whose drafter's cache lapses before each time that it is used."""
    script = [(NGRAM, 20), (CHAIN, 8), (Off(), 32), (CHAIN, 8)]
    started = start(folder, policy, "eagle", script, cores=TWO)
    yield started
    started.close()


def test_greedy_answers_stay_while_a_drafter_is_adopted_and_strategies_take_turns(
    engine: SglangEngine, policy: Path, fitted: Drafter
) -> None:
    check_adoption_in_mid_answer(engine, policy, fitted)


def test_a_cache_that_lapsed_is_rebuilt_on_all_ranks(
    engine: SglangEngine, policy: Path, folder: Path, fitted: Drafter
) -> None:
    check_rebuilt_cache(engine, policy, folder, fitted)


def test_tokens_follow_the_policy(
    engine: SglangEngine, policy: Path, memoryless: Memoryless
) -> None:
    with swapped(engine, policy, memoryless.weights):
        engine.adopt_drafter(FIRST, memoryless.drafter)
        done = draw(engine, temperature=0.7)
    check_frequencies(done, memoryless.logits, temperature=0.7)
    assert origins(done)["accepted"] > 1000


def test_finds_a_part_of_a_weight_that_only_one_rank_lacks(
    engine: SglangEngine, policy: Path, fitted: Drafter
) -> None:
    weights = dict(load_decoder(policy).weights)
    engine.swap_weights(PolicyVersion(engine.version + 1), weights)
    client = engine._client  # pyright: ignore[reportPrivateUsage]
    client.run(client.verify(weights, "target", "it"))
    for name, place in [
        ("model.layers.2.mlp.down_proj.weight", (0, -1)),
        ("model.layers.0.self_attn.v_proj.weight", (-1, 0)),
        ("model.embed_tokens.weight", (-1, 0)),
    ]:
        changed = weights[name].clone()
        changed[place] += 1
        held = name.replace("v_proj", "qkv_proj")
        with pytest.raises(RankError, match=f"after a fault SGLang holds another {held}"):
            client.run(client.verify({**weights, name: changed}, "target", "a fault"))
    engine.adopt_drafter(FIRST, fitted)
    client.run(client.verify(drafter_as_held(fitted.state_dict()), "draft", "it"))


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_other_families_are_divided_and_the_death_of_a_rank_ends_the_engine(
    family: str, tmp_path: Path
) -> None:
    folder, other = (save_model(tmp_path / name, seed, family) for seed, name in enumerate("ab"))
    engine = start(tmp_path, folder, "eagle", [(NGRAM, 16)], cores=TWO)
    prompts = random_prompts(4)
    for version, model in enumerate((other, folder), start=1):
        engine.swap_weights(PolicyVersion(version), dict(load_decoder(model).weights))
        submitted = [new_request(i, prompt, GREEDY, 40) for i, prompt in enumerate(prompts)]
        check_greedy(model, submitted, answers(engine, submitted))
    [_, second] = engine._client.schedulers  # pyright: ignore[reportPrivateUsage]
    os.kill(second, signal.SIGKILL)
    with pytest.raises(RankError, match="SGLang's scheduler"):
        answers(engine, [new_request(9, prompts[0], GREEDY, 100)])
    engine.close()


@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_dies_while_it_starts_is_reported(
    dies: int, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = SchedulerGroup.ready

    def kill_first(group: SchedulerGroup) -> list[dict[str, Any]]:
        os.kill(group.pids[dies], signal.SIGKILL)
        return ready(group)

    monkeypatch.setattr(SchedulerGroup, "ready", kill_first)
    with pytest.raises(RankError, match="SGLang's scheduler was ended by SIGKILL"):
        start(tmp_path, policy, "eagle", [(NGRAM, 16)], cores=TWO)


def test_a_start_that_hangs_is_reported_with_its_log(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = SchedulerGroup.ready

    def stop_all(group: SchedulerGroup) -> list[dict[str, Any]]:
        for pid in group.pids:
            os.kill(pid, signal.SIGSTOP)
        return ready(group)

    monkeypatch.setattr(SchedulerGroup, "ready", stop_all)
    log = re.escape(str(tmp_path / "sglang.log"))
    with pytest.raises(RankError, match=f"SGLang stood still for 2 s while it started; see {log}"):
        start(tmp_path, policy, "eagle", [(NGRAM, 16)], stuck_seconds=2.0)


def test_a_rank_without_our_hooks_is_named(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for no plan, so that the first pass would never end."""
    begin = SchedulerProcess.__init__

    def begin_second_without(
        process: SchedulerProcess, device: str, given: Mapping[str, str], log: Path, *rest: Any
    ) -> None:
        second = log.stem.endswith("-1")
        kept = {n: v for n, v in given.items() if not (second and n == "TLT_SGLANG_PLUGIN")}
        begin(process, device, kept, log, *rest)

    monkeypatch.setattr(SchedulerProcess, "__init__", begin_second_without)
    with pytest.raises(RankError, match="scheduler 1 of 2: TLT's hooks are not in place"):
        start(tmp_path, policy, "eagle", [(NGRAM, 16)], cores=TWO)
