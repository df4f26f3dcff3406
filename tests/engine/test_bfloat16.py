"""A policy in bfloat16 samples from logits that aren't rounded to bfloat16."""

from pathlib import Path

import pytest
import torch

from tests.engine.conftest import save_model
from tests.engine.reference import answers, new_request, random_prompts, show
from tlt.base.id_types import PolicyVersion
from tlt.engine.base import Sampling
from tlt.engine.native import NativeEngine
from tlt.models.decoder_from_folder import load_decoder


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("policy"), seed=1)


def engine(policy: Path, dtype: torch.dtype = torch.bfloat16) -> NativeEngine:
    model = load_decoder(policy, dtype)
    layers = (model.config.layers,)
    return NativeEngine(model, show, 2, 64, torch.device("cpu"), PolicyVersion(0), layers)


def test_logprobs_are_those_of_exact_logits(policy: Path) -> None:
    made = engine(policy)
    prompt = random_prompts(1, shortest=8)[0]
    done = answers(made, [new_request(0, prompt, Sampling(), 20)])[0]
    states = made.hidden_states(0)[len(prompt) - 1 :].double()
    logits = states[:, 0] @ made.embedding_and_head[1].double().t()
    exact, rounded = (
        found.log_softmax(-1).gather(1, torch.tensor(done.tokens)[:, None])[:, 0].tolist()
        for found in (logits, logits.bfloat16().double())
    )
    assert done.logprobs == pytest.approx(exact, abs=1e-4)
    assert done.logprobs != pytest.approx(rounded, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_promises_the_same_tokens_only_in_float32(policy: Path, dtype: torch.dtype) -> None:
    made = engine(policy, dtype)
    assert made.capabilities.token_identical == (dtype == torch.float32)
    assert made.capabilities.shared_noise
