"""A failed weight update leaves the old weights or a closed engine, never mixed weights."""

from pathlib import Path

import pytest
import torch

from tests.engine import drafter_models
from tests.engine.conftest import save_model
from tests.engine.reference import answers, greedy_answer, new_request, random_prompts
from tlt.engine.sglang.speculation_options import SpeculationOptions
from tlt.engine.sglang.start_engine_with_tap import start_engine
from tlt.errors import ConfigError, RankError
from tlt.id_types import NAMED, PolicyVersion
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.drafter_folder import save_drafter
from tlt.strategies import Draft, Off


@pytest.mark.thorough
def test_starts_again_without_speculation_once_that_is_given_up(tmp_path: Path) -> None:
    policy = drafter_models.predictable_policy(tmp_path / "policy")
    save_drafter(drafter_models.random_drafter("eagle", seed=2), tmp_path / "drafter")
    engine = start_engine(
        policy,
        str,
        slots=2,
        max_context=128,
        device=torch.device("cpu"),
        dtype=torch.float32,
        version=PolicyVersion(0),
        folder=tmp_path,
        seed=0,
        stuck_seconds=60,
        captured=drafter_models.captured("eagle"),
        speculation=SpeculationOptions(
            algorithm="EAGLE",
            drafter=str(tmp_path / "drafter"),
            trained=True,
            layers=1,
            arms=(Off(), Draft(depth=2, noise=False)),
            fixed=Draft(depth=2, noise=False),
        ),
    )
    prompt = random_prompts(1, shortest=5)[0]
    before = answers(engine, [new_request(0, prompt)])[0]
    assert NAMED in {span.version for span in before.drafters}
    engine.stop_speculating()
    other = save_model(tmp_path / "other", seed=5, tie_word_embeddings=False)
    weights = dict(load_decoder(other).weights)
    assert engine.capabilities.hidden_states
    engine.swap_weights(PolicyVersion(1), weights)
    assert not engine.capabilities.hidden_states
    assert not engine.capabilities.ngram
    after = answers(engine, [new_request(1, prompt)])[1]
    assert after.tokens == greedy_answer(other, prompt, 20)
    assert [(span.version, span.tokens) for span in after.policies] == [(1, 20)]
    assert {span.version for span in after.drafters} == {None}
    engine.close()


def test_update_that_fails_midway_ends_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = save_model(tmp_path / "policy", seed=1)
    engine = start_engine(
        policy,
        str,
        slots=2,
        max_context=128,
        device=torch.device("cpu"),
        dtype=torch.float32,
        version=PolicyVersion(0),
        folder=tmp_path,
        seed=0,
        stuck_seconds=60,
    )
    engine.submit([new_request(0, random_prompts(1)[0], max_new_tokens=100)])
    engine.step()
    weights = dict(load_decoder(policy).weights)
    weights["model.norm.weight"] = torch.zeros(3)
    # we refuse it before anything is sent
    with pytest.raises(ConfigError, match="json implies"):
        engine.swap_weights(PolicyVersion(1), weights)
    assert engine.running == 1
    # SGLang refuses it after other tensors were loaded
    monkeypatch.setattr("tlt.engine.sglang.engine.describe_mismatch", lambda *_: None)
    with pytest.raises(RankError, match="Attempted to load weight"):
        engine.swap_weights(PolicyVersion(1), weights)
    with pytest.raises(RankError, match="SGLang's scheduler ended"):
        engine.step()
    engine.close()
