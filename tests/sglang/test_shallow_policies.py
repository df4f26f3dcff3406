"""A new EAGLE-3 drafter reads layers that SGLang captures, of the shallowest policies, too."""

from pathlib import Path

import pytest
import torch

from tests.engine.conftest import save_model
from tests.engine.reference import answers
from tests.sglang.speculating import CHAIN, check_greedy, check_proposals, proposals, requests
from tlt.base.id_types import PolicyVersion
from tlt.engine.sglang.client.engine import SglangEngine
from tlt.engine.sglang.client.start_engine_with_tap import start_client
from tlt.engine.sglang.shared.scheduler_options import SpeculationOptions
from tlt.models.config_json import read_config
from tlt.models.drafter_folder import load_drafter, save_drafter
from tlt.trainer.drafter.initial_drafter import drafter_config_for, initialise_drafter
from tlt.trainer.drafter.samples import state_layers

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("layers", [3, 4, 5])
def test_a_new_eagle3_drafter_proposes_the_same_in_sglang(layers: int, tmp_path: Path) -> None:
    policy = save_model(tmp_path / "policy", seed=1, num_hidden_layers=layers)
    config = drafter_config_for(read_config(policy), "eagle3")
    drafter = initialise_drafter(config, torch.ones(1), seed=2)
    save_drafter(drafter, tmp_path / "drafter")
    assert load_drafter(tmp_path / "drafter", layers).config == config
    client, tap = start_client(
        policy,
        slots=8,
        max_context=128,
        device=torch.device("cpu"),
        dtype=torch.float32,
        version=PolicyVersion(0),
        folder=tmp_path,
        stuck_seconds=60,
        captured=state_layers(config, layers),
        speculation=SpeculationOptions(
            algorithm="EAGLE3",
            drafter=str(tmp_path / "drafter"),
            trained=True,
            layers=len(config.captured),
            arms=(CHAIN,),
            fixed=CHAIN,
        ),
        proposals=tmp_path / "proposals",
    )
    engine = SglangEngine(client, policy, tap, str, 8, 128, PolicyVersion(0))
    submitted = requests(8, tokens=20)
    done = answers(engine, submitted)
    engine.close()
    check_greedy(policy, submitted, done)
    assert check_proposals(proposals(tmp_path), submitted, done, drafter, policy) > 20
