"""Guessing changes how fast tokens come, and never which."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.conftest import POLICIES, save_model
from tests.engine.oracle import answers, ask, forced_logits, random_prompts, show
from tests.sglang import drafting
from tlt.engine.base import Request, Sampling
from tlt.engine.native import NativeEngine
from tlt.models.drafter import Drafter
from tlt.models.folder import load_decoder
from tlt.strategies import Draft, Ngram, Off, Strategy
from tlt.types import DrafterVersion, PolicyVersion

LONGEST = 6


def engine(policy: Path, slots: int = 4, dtype: torch.dtype = torch.float64) -> NativeEngine:
    model = load_decoder(policy, dtype)
    layers = range(1, model.config.layers + 1)
    device, version = torch.device("cpu"), PolicyVersion(0)
    return NativeEngine(model, show, slots, 128, device, version, layers, LONGEST)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drafting.predictable_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module", params=["eagle", "eagle3"])
def drafter(request: pytest.FixtureRequest, policy: Path) -> Drafter:
    return drafting.fitted_drafter(request.param, policy)


def requests(count: int = 40, sampling: Sampling | None = None) -> list[Request]:
    drawn = sampling or Sampling()
    prompts = random_prompts(count // 4)
    return [ask(i, prompts[i // 4], drawn, 2 + i % 40, stop_tokens=(4, 9)) for i in range(count)]


@pytest.mark.parametrize("noise", [True, False])
def test_it_proposes_what_the_module_does(policy: Path, drafter: Drafter, noise: bool) -> None:
    asked = requests()
    plain = answers(engine(policy), asked)
    speculating = engine(policy)
    speculating.adopt(DrafterVersion(1), drafter)
    speculating.decode_with(Draft(depth=3, noise=noise))
    done = answers(speculating, asked)
    for r in asked:
        assert done[r.id].tokens == plain[r.id].tokens
    tokens = sum(len(c.tokens) for c in done.values())
    accepted = sum(s.tokens for c in done.values() for s in c.origins if s.origin == "accepted")
    print("accepted", accepted, tokens)
