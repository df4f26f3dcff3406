"""Weights arrive whole, in any number of parts; a failed update never leaves mixed ones."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.conftest import save_model
from tests.engine.reference import answers, greedy_answer, new_request, random_prompts
from tests.sglang.speculating import start_engine
from tlt.base.id_types import PolicyVersion
from tlt.engine.sglang.client import sglang_client
from tlt.errors import ConfigError, RankError
from tlt.models.decoder_from_folder import load_decoder

pytestmark = pytest.mark.sglang


def test_weights_arrive_in_parts_until_an_update_that_fails_midway_ends_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, other = (save_model(tmp_path / name, seed) for seed, name in enumerate(("a", "b")))
    engine = start_engine(policy, tmp_path, slots=2)
    # most tensors are a part of their own
    monkeypatch.setattr(sglang_client, "PART_BYTES", 20_000)
    prompt = random_prompts(1)[0]
    for version, folder in enumerate((other, policy), start=1):
        engine.swap_weights(PolicyVersion(version), dict(load_decoder(folder).weights))
        done = answers(engine, [new_request(version, prompt)])
        assert done[version].tokens == greedy_answer(folder, prompt, 20)
    engine.submit([new_request(0, random_prompts(1)[0], max_new_tokens=100)])
    engine.step()
    weights = dict(load_decoder(policy).weights)
    weights["model.norm.weight"] = torch.zeros(3)
    # we refuse it before anything is sent
    with pytest.raises(ConfigError, match="json implies"):
        engine.swap_weights(PolicyVersion(3), weights)
    assert engine.running == 1
    # SGLang refuses it after other tensors were loaded
    monkeypatch.setattr("tlt.engine.sglang.client.engine.describe_mismatch", lambda *_: None)
    with pytest.raises(RankError, match="Attempted to load weight"):
        engine.swap_weights(PolicyVersion(3), weights)
    with pytest.raises(RankError, match="SGLang's scheduler ended"):
        engine.step()
    engine.close()


def test_a_swap_may_take_long_as_long_as_parts_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck_seconds, pause = 4.0, 0.5
    policy = save_model(tmp_path / "policy", seed=1)
    engine = start_engine(policy, tmp_path, slots=2, stuck_seconds=stuck_seconds)
    monkeypatch.setattr(sglang_client, "PART_BYTES", 20_000)
    manager = engine._client._manager  # pyright: ignore[reportPrivateUsage]
    update, parts = manager.update_weights_from_tensor, 0

    async def slowly(*arguments: Any) -> Any:
        nonlocal parts
        parts += 1
        await asyncio.sleep(pause)
        return await update(*arguments)

    monkeypatch.setattr(manager, "update_weights_from_tensor", slowly)
    engine.swap_weights(PolicyVersion(1), dict(load_decoder(policy).weights))
    assert parts * pause > stuck_seconds
    prompt = random_prompts(1)[0]
    assert answers(engine, [new_request(1, prompt)])[1].tokens == greedy_answer(policy, prompt, 20)
    engine.close()
