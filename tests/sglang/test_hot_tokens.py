"""SGLang proposes with the rows of the policy's head that a drafter's tokens name."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import drafter_models
from tests.engine.chi_square import p_value
from tests.engine.reference import answers, new_request, random_prompts
from tests.engine.test_sampled_distribution import TRIALS
from tests.sglang.speculating import (
    CHAIN,
    FIRST,
    SECOND,
    check_greedy,
    check_proposals,
    origins,
    proposals,
    requests,
    start,
)
from tlt.base.id_types import DrafterVersion, PolicyVersion
from tlt.engine.base import Sampling
from tlt.engine.sglang.client import sglang_launcher
from tlt.engine.sglang.client.engine import SglangEngine
from tlt.engine.sglang.client.start_engine_with_tap import start_client
from tlt.engine.sglang.shared.scheduler_options import SpeculationOptions
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.decoder_spec import HEAD
from tlt.models.drafter_folder import TOKEN_MAP, save_drafter
from tlt.models.eagle_drafter import Drafter

pytestmark = pytest.mark.sglang
EVEN, ODD = range(0, 96, 2), range(1, 97, 2)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drafter_models.predictable_policy(tmp_path_factory.mktemp("policy") / "policy")


@pytest.fixture(scope="module", params=["eagle", "eagle3", "two ranks"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def fitted(kind: str, policy: Path) -> Drafter:
    return drafter_models.fitted_drafter("eagle3" if kind == "eagle3" else "eagle", policy)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sglang")


@pytest.fixture(scope="module")
def engine(fitted: Drafter, kind: str, policy: Path, folder: Path) -> Iterator[SglangEngine]:
    started = start(
        folder,
        policy,
        fitted.config.layout,
        [(CHAIN, 16)],
        tensor_parallel=2 if kind == "two ranks" else 1,
        hot_tokens=len(EVEN),
    )
    yield started
    started.close()


def check_drafter(engine: SglangEngine, drafter: Drafter, policy: Path, folder: Path) -> None:
    """Check that answers are the policy's, and that proposals are the drafter's with its head."""
    known, submitted = len(proposals(folder)), requests(8)
    done = answers(engine, submitted)
    check_greedy(policy, submitted, done)
    made = proposals(folder)[known:]
    assert check_proposals(made, submitted, done, drafter, policy) > 50
    assert origins(done)["accepted"] > 20


def test_head_and_map_follow_drafter_and_policy(
    engine: SglangEngine, fitted: Drafter, policy: Path, folder: Path, tmp_path: Path
) -> None:
    for version, tokens in ((FIRST, EVEN), (SECOND, ODD)):
        hot = drafter_models.with_hot_tokens(fitted, tokens)
        engine.adopt_drafter(version, hot)
        check_drafter(engine, hot, policy, folder)
    # another policy, whose head names each token by its neighbour's row
    turned = drafter_models.turned_policy(policy, tmp_path / "turned")
    engine.swap_weights(PolicyVersion(1), dict(load_decoder(turned).weights))
    check_drafter(engine, hot, turned, folder)
    engine.swap_weights(PolicyVersion(2), dict(load_decoder(policy).weights))
    check_drafter(engine, hot, policy, folder)


def test_tokens_follow_the_policy(
    engine: SglangEngine, fitted: Drafter, kind: str, policy: Path, tmp_path: Path
) -> None:
    if kind == "eagle3":
        pytest.skip("verification doesn't depend on the drafter's layout")
    logits = 1.5 * torch.randn(97, generator=torch.Generator().manual_seed(3))
    logits[4] = 5.0
    state = drafter_models.memoryless_policy(tmp_path / "policy", logits)
    weights = dict(load_decoder(tmp_path / "policy").weights)
    assert HEAD in weights
    engine.swap_weights(PolicyVersion(engine.version + 1), weights)
    drafter = drafter_models.with_hot_tokens(drafter_models.constant_drafter(state), EVEN)
    engine.adopt_drafter(DrafterVersion(9), drafter)
    prompt, tokens = random_prompts(1, shortest=5)[0], 98
    count = -(-TRIALS["sglang"].draws // tokens)
    done = answers(engine, [new_request(i, prompt, Sampling(), tokens) for i in range(count)])
    drawn = torch.tensor([token for completion in done.values() for token in completion.tokens])
    found = p_value(drawn.bincount(minlength=97), logits.softmax(-1))
    assert found > TRIALS["sglang"].significance
    assert origins(done)["accepted"] > 3000
    engine.swap_weights(PolicyVersion(engine.version + 1), dict(load_decoder(policy).weights))


@pytest.mark.parametrize("layout", ["eagle", "eagle3"])
def test_a_stock_sglang_proposes_what_an_exported_drafter_can(
    layout: drafter_models.Layout, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder and, with EAGLE, its token map say all: none of our parts sets the head."""
    whole = sglang_launcher._arguments  # pyright: ignore[reportPrivateUsage]
    token_map = tmp_path / "drafter" / TOKEN_MAP

    def with_token_map(options: sglang_launcher.Options) -> dict[str, Any]:
        return whole(options) | {
            "speculative_token_map": str(token_map) if layout == "eagle" else None
        }

    monkeypatch.setattr(sglang_launcher, "_arguments", with_token_map)
    drafter = drafter_models.with_hot_tokens(drafter_models.fitted_drafter(layout, policy), ODD)
    _, head = drafter_models.policy_ends(policy)
    save_drafter(drafter, tmp_path / "drafter", policy_head=head)
    client, tap = start_client(
        policy,
        slots=8,
        max_context=128,
        device=torch.device("cpu"),
        dtype=torch.float32,
        version=PolicyVersion(0),
        folder=tmp_path,
        stuck_seconds=60,
        captured=drafter_models.captured(layout),
        speculation=SpeculationOptions(
            algorithm="EAGLE" if layout == "eagle" else "EAGLE3",
            drafter=str(tmp_path / "drafter"),
            trained=True,
            layers=len(drafter.config.captured),
            arms=(CHAIN,),
            fixed=CHAIN,
        ),
        proposals=tmp_path / "proposals",
    )
    engine = SglangEngine(client, policy, tap, str, 8, 128, PolicyVersion(0))
    check_drafter(engine, drafter, policy, tmp_path)
    engine.close()
