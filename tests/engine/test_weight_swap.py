"""After a swap, new weights continue on the old cache."""

from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from tests.engine.conftest import MakeEngine, save_model
from tests.engine.reference import (
    finish,
    forced_logits,
    greedy_answer,
    logprobs_of,
    new_request,
    random_prompts,
    transformers_model,
)
from tlt.base.id_types import PolicyVersion
from tlt.engine.base import Sampling
from tlt.errors import ConfigError
from tlt.models.decoder_from_folder import load_decoder

PROMPT = random_prompts(1, shortest=9)[0]
LENGTH = 100


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling()])
@pytest.mark.parametrize("kind", ["plain", "inference", "parameter"])
def test_later_tokens_use_the_new_weights(
    make_engine: MakeEngine, folder: Path, next_folder: Path, sampling: Sampling, kind: str
) -> None:
    weights = dict(load_decoder(next_folder, torch.float64).weights)
    if kind == "inference":
        with torch.inference_mode():
            weights = {name: weight.clone() for name, weight in weights.items()}
    if kind == "parameter":
        weights = {name: torch.nn.Parameter(weight) for name, weight in weights.items()}
    engine = make_engine(folder)
    engine.submit([new_request(0, PROMPT, sampling, max_new_tokens=LENGTH)])
    for _ in range(3):
        engine.step()
    engine.swap_weights(PolicyVersion(4), weights)
    # the same prompt under the new policy must not reuse the old policy's cache
    engine.submit([new_request(1, PROMPT, sampling, max_new_tokens=8)])
    done = finish(engine)
    answer = done[0].tokens
    before, after = done[0].policies
    assert (before.version, after.version) == (0, 4)
    assert 0 < before.tokens < LENGTH
    assert before.tokens + after.tokens == len(answer) == LENGTH
    assert [(s.version, s.tokens) for s in done[1].policies] == [(4, 8)]

    ids = torch.tensor([[*PROMPT, *answer]])
    swap = len(PROMPT) + before.tokens - 1
    cache = DynamicCache()
    with torch.inference_mode():
        old = transformers_model(folder)(ids[:, :swap], past_key_values=cache).logits[0]
        new = transformers_model(next_folder)(ids[:, swap:], past_key_values=cache).logits[0]
    logits = torch.cat([old[len(PROMPT) - 1 :], new[:-1]])
    assert done[0].logprobs == pytest.approx(logprobs_of(logits, answer, 1).tolist(), abs=1e-4)
    if sampling.temperature == 0:
        assert answer == logits.argmax(-1).tolist()
        assert answer != greedy_answer(folder, PROMPT, LENGTH)
        assert done[1].tokens == greedy_answer(next_folder, PROMPT, 8)
    fresh = forced_logits(next_folder, PROMPT, done[1].tokens)
    expected = logprobs_of(fresh, done[1].tokens, 1).tolist()
    assert done[1].logprobs == pytest.approx(expected, abs=1e-4)


def test_weights_that_do_not_fit_change_nothing(
    make_engine: MakeEngine, folder: Path, next_folder: Path, tmp_path: Path
) -> None:
    engine = make_engine(folder)
    lacking = dict(load_decoder(next_folder, torch.float64).weights)
    del lacking["model.norm.weight"]
    with pytest.raises(ConfigError, match=r"version 1 .* model\.norm\.weight is missing"):
        engine.swap_weights(PolicyVersion(1), lacking)
    wide = load_decoder(save_model(tmp_path, seed=3, head_dim=24))
    with pytest.raises(ConfigError, match=r"config\.json implies"):
        engine.swap_weights(PolicyVersion(1), wide.weights)
    engine.submit([new_request(0, PROMPT, max_new_tokens=8)])
    assert finish(engine)[0].tokens == greedy_answer(folder, PROMPT, 8)
