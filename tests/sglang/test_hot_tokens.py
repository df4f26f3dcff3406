"""SGLang proposes with the rows of the policy's head that a drafter's tokens name."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine import drafter_models
from tests.engine.reference import answers
from tests.sglang.speculating import (
    CHAIN,
    FIRST,
    SECOND,
    check_frequencies,
    check_greedy,
    check_proposals,
    draw,
    make_memoryless,
    origins,
    proposals,
    requests,
    start,
    start_engine,
    swapped,
    with_drafter,
)
from tlt.base.id_types import DrafterVersion, PolicyVersion
from tlt.engine.sglang.client import sglang_launcher
from tlt.engine.sglang.client.engine import SglangEngine
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.decoder_spec import HEAD
from tlt.models.drafter_folder import TOKEN_MAP
from tlt.models.eagle_drafter import Drafter

pytestmark = pytest.mark.sglang
EVEN, ODD = range(0, 96, 2), range(1, 97, 2)


@pytest.fixture(scope="module", params=["eagle", "eagle3", "two ranks"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def fitted(kind: str, policy: Path) -> Drafter:
    return drafter_models.fitted_drafter("eagle3" if kind == "eagle3" else "eagle", policy)


@pytest.fixture(scope="module")
def engine(fitted: Drafter, kind: str, policy: Path, folder: Path) -> Iterator[SglangEngine]:
    started = start(
        folder,
        policy,
        fitted.config.layout,
        [(CHAIN, 16)],
        cores=((), ()) if kind == "two ranks" else ((),),
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
    memoryless = make_memoryless(tmp_path, likeliest=4)
    assert HEAD in memoryless.weights
    with swapped(engine, policy, memoryless.weights):
        drafter = drafter_models.with_hot_tokens(memoryless.drafter, EVEN)
        engine.adopt_drafter(DrafterVersion(9), drafter)
        done = draw(engine)
    check_frequencies(done, memoryless.logits)
    assert origins(done)["accepted"] > 3000


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
    speculation = with_drafter(drafter, policy, tmp_path, head=head)
    engine = start_engine(policy, tmp_path, slots=8, **speculation)
    check_drafter(engine, drafter, policy, tmp_path)
    engine.close()
