"""A drafter that proposes some tokens only changes no answer, and its head follows the policy."""

from pathlib import Path

import msgspec
import pytest
import torch

from tests.engine import drafter_models
from tests.engine.reference import answers
from tests.engine.test_speculation import accept_length, engine, requests, same
from tlt.base.id_types import PolicyVersion
from tlt.base.strategies import Draft
from tlt.engine.native.fused_drafter_weights import DrafterWeights
from tlt.models.config_json import read_config
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.eagle_drafter import Drafter
from tlt.trainer.drafter.initial_drafter import drafter_config_for

EVEN = range(0, 96, 2)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drafter_models.predictable_policy(tmp_path_factory.mktemp("policy") / "policy")


@pytest.fixture(scope="module", params=["eagle", "eagle3"])
def hot(request: pytest.FixtureRequest, policy: Path) -> Drafter:
    fitted = drafter_models.fitted_drafter(request.param, policy)
    return drafter_models.with_hot_tokens(fitted, EVEN)


@pytest.mark.parametrize("strategy", [Draft(depth=3), Draft(depth=6, noise=False)])
def test_gives_the_same_tokens(policy: Path, hot: Drafter, strategy: Draft) -> None:
    batch = requests()
    plain = answers(engine(policy, hot), batch)
    done = answers(engine(policy, hot, strategy), batch)
    assert same(done, plain)
    assert accept_length(done) > 1.2
    for completion in done.values():
        position = 0
        for span in completion.origins:
            if span.origin == "accepted":
                assert {*completion.tokens[position : position + span.tokens]} <= {*EVEN}
            position += span.tokens


def test_acceptance_survives_a_policy_update(policy: Path, hot: Drafter, tmp_path: Path) -> None:
    turned = drafter_models.turned_policy(policy, tmp_path / "turned")
    made, batch = engine(policy, hot, Draft(depth=3)), requests()
    made.swap_weights(PolicyVersion(1), load_decoder(turned, torch.float64).weights)
    done = answers(made, batch)
    assert same(done, answers(engine(turned, hot), batch))
    adopted_after = answers(engine(turned, hot, Draft(depth=3)), batch)
    assert accept_length(done) == accept_length(adopted_after) > 1.2


def test_a_vocabulary_that_is_not_larger_has_neither_map_nor_copy(policy: Path) -> None:
    config = read_config(policy)
    for layout in ("eagle", "eagle3"):
        plain = drafter_config_for(msgspec.structs.replace(config, layers=6), layout)
        small = drafter_config_for(msgspec.structs.replace(config, layers=6), layout, 97)
        assert small == plain
    drafter, head = drafter_models.random_drafter("eagle", 1), torch.randn(97, 64)
    weights = DrafterWeights(drafter, head, head.dtype, head.device)
    assert weights.head is head
    assert weights.tokens is None
