"""A new EAGLE-3 drafter reads layers that SGLang captures, of the shallowest policies, too."""

from pathlib import Path

import pytest
import torch

from tests.engine.conftest import save_model
from tests.engine.reference import answers
from tests.sglang.speculating import (
    check_greedy,
    check_proposals,
    proposals,
    requests,
    start_engine,
    with_drafter,
)
from tlt.models.config_json import read_config
from tlt.models.drafter_folder import load_drafter
from tlt.trainer.drafter.initial_drafter import drafter_config_for, initialise_drafter

pytestmark = pytest.mark.sglang


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
