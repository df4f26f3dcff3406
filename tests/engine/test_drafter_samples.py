"""Training samples of drafters hold what the policy computed in decoding or in a prefill."""

from pathlib import Path

import pytest
import torch

from tests.engine.conftest import SHAPE, save_model
from tests.engine.reference import show
from tlt.base.id_types import Member, PolicyVersion, PromptIndex, Step
from tlt.engine.base import NoiseKey, Request, Sampling
from tlt.engine.native import NativeEngine
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.decoder_spec import Decoder
from tlt.ranks.drafter.samples_from_engine import answered, read, rollout
from tlt.trainer.drafter.samples import EmbeddingAndHead

LAYERS: int = SHAPE["num_hidden_layers"]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_decoder(save_model(tmp_path_factory.mktemp("policy"), seed=5), torch.float64)


def engine(policy: Decoder) -> NativeEngine:
    device, version = torch.device("cpu"), PolicyVersion(0)
    return NativeEngine(policy, show, 3, 40, device, version, (1, LAYERS))


def requests() -> list[Request]:
    return [
        Request(
            id=10 + index,
            prompt=tuple(range(1, 2 + 3 * index)),
            key=NoiseKey(
                seed=3,
                step=Step(0),
                purpose="train",
                prompt=PromptIndex(index),
                member=Member(0),
            ),
            sampling=Sampling(),
            max_new_tokens=6 + index,
            stop_tokens=frozenset(),
        )
        for index in range(5)
    ]


def test_prefill_gives_the_states_of_decoding(policy: Decoder):
    written = {text.id: (text, states) for text, states in answered(engine(policy), requests())}
    texts = [text for text, _ in written.values()]
    found = {text.id: (text, states) for text, states in read(engine(policy), texts)}
    assert sorted(found) == sorted(written) == [10, 11, 12, 13, 14]
    for id, (text, states) in written.items():
        assert states.shape == (len(text.tokens) - 1, 2, SHAPE["hidden_size"])
        assert found[id][0] == text
        torch.testing.assert_close(found[id][1], states)


def test_noise_and_last_states_reproduce_the_drawn_tokens(policy: Decoder):
    keys = {request.id: request.key for request in requests()}
    ends = EmbeddingAndHead.of(policy, torch.float64, torch.device("cpu"))
    for text, states in answered(engine(policy), requests()):
        drawn = rollout(text, states, keys[text.id], policy.config.vocabulary)
        positions = torch.arange(text.prompt, len(text.tokens))
        logits = drawn.sample.states[positions - 1, -1] @ ends.head.T
        tokens = (logits + drawn.noise(positions, None)).argmax(-1)
        assert tuple(tokens.tolist()) == text.tokens[text.prompt :]


def test_uses_the_untied_head_of_the_policy(tmp_path: Path):
    folder = save_model(tmp_path / "untied", seed=6, tie_word_embeddings=False)
    untied = load_decoder(folder)
    ends = EmbeddingAndHead.of(untied, torch.float32, torch.device("cpu"))
    assert torch.equal(ends.head, untied.weights["lm_head.weight"])
    assert not torch.equal(ends.head, ends.embedding)
