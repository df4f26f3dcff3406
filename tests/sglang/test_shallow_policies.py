"""A new EAGLE-3 drafter reads layers that SGLang captures, of the shallowest policies, too."""

from pathlib import Path
from typing import Literal

import msgspec
import pytest
import torch

from tests.engine.conftest import save_model
from tests.engine.reference import answers, greedy_answer, new_request
from tests.ranks.ranks import rank_job, with_policy
from tests.sglang.speculating import (
    check_greedy,
    check_proposals,
    proposals,
    requests,
    start_engine,
    with_drafter,
)
from tlt.models.config_json import read_config
from tlt.models.drafter_folder import load_drafter, save_drafter
from tlt.models.tokenizer import Tokenizer
from tlt.ranks import engine_factory
from tlt.spec.config import DrafterSpec, RolloutSpec, SpeculationSpec
from tlt.trainer.drafter.initial_drafter import drafter_config_for, initialise_drafter

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("engine", ["native", "sglang"])
def test_a_named_eagle3_drafter_may_read_the_last_layer_only_in_the_native_engine(
    engine: Literal["native", "sglang"], tmp_path: Path
) -> None:
    spec = with_policy(
        tmp_path,
        rollout=RolloutSpec(engine=engine, slots=2, max_new_tokens=20),
        speculation=SpeculationSpec(mode="adaptive"),
        drafter=DrafterSpec(path=str(tmp_path / "drafter"), train="off"),
    )
    policy = Path(spec.policy.path)
    shape = drafter_config_for(read_config(policy), "eagle")
    config = msgspec.structs.replace(shape, layout="eagle3", captured=(1,))
    save_drafter(initialise_drafter(config, torch.ones(1), seed=2), tmp_path / "drafter")
    started = engine_factory.start_engine(rank_job(tmp_path, spec), Tokenizer(spec.policy.path))
    refused = "it reads what follows the last layer, which SGLang gives no EAGLE-3 drafter"
    assert (started.drafter is None) == (engine == "sglang") == (started.complaint is not None)
    assert started.complaint is None or started.complaint.endswith(refused)
    done = answers(started.engine, [new_request(0, [3, 4, 5])])
    assert done[0].tokens == greedy_answer(policy, [3, 4, 5], 20)
    started.engine.close()


@pytest.mark.parametrize("layers", [3, 4, 5])
def test_a_new_eagle3_drafter_proposes_the_same_in_sglang(layers: int, tmp_path: Path) -> None:
    policy = save_model(tmp_path / "policy", seed=1, num_hidden_layers=layers)
    config = drafter_config_for(read_config(policy), "eagle3")
    drafter = initialise_drafter(config, torch.ones(1), seed=2)
    speculation = with_drafter(drafter, policy, tmp_path)
    assert load_drafter(tmp_path / "drafter", layers).config == config
    engine = start_engine(policy, tmp_path, slots=8, **speculation)
    submitted = requests(8, tokens=20)
    done = answers(engine, submitted)
    engine.close()
    check_greedy(policy, submitted, done)
    assert check_proposals(proposals(tmp_path), submitted, done, drafter, policy) > 20
