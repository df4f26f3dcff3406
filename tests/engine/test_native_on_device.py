"""The native engine runs on an accelerator: no device is mixed, and the host seldom waits."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.engine import drafter_models
from tests.engine.conftest import save_model
from tests.engine.reference import GREEDY, answers, new_request, random_prompts, show
from tests.labelled_device import CUDA, labelled_device
from tlt.base.id_types import DrafterVersion, PolicyVersion
from tlt.base.strategies import Draft, Ngram, Off, Strategy
from tlt.engine.base import Completion, Request, Sampling
from tlt.engine.native import NativeEngine
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.eagle_drafter import Drafter

CPU = torch.device("cpu")
STRATEGIES: dict[str, Strategy] = {
    "plain": Off(),
    "n-grams": Ngram(tokens=4),
    "drafter with noise": Draft(depth=3),
    "greedy drafter": Draft(depth=3, noise=False),
}
# steps after which the weights, and after which the drafter is swapped
SWAPS = (5, 9)
SLOTS = 4
DRAWN = Sampling()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drafter_models.predictable_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def next_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("next"), seed=2, tie_word_embeddings=False)


def requests(sampling: Sampling, stop_strings: tuple[str, ...] = ()) -> list[Request]:
    prompts = random_prompts(3, shortest=2)
    return [
        new_request(
            i, prompts[i // 2], sampling, 12 + 3 * i, stop_tokens=(4, 9), stop_strings=stop_strings
        )
        for i in range(6)
    ]


def engine(
    policy: Path, strategy: Strategy, drafter: Drafter, device: torch.device
) -> NativeEngine:
    model = load_decoder(policy, torch.float64)
    layers = range(1, model.config.layers + 1)
    arms = list(STRATEGIES.values())
    made = NativeEngine(model, show, SLOTS, 128, device, PolicyVersion(0), layers, arms)
    made.adopt_drafter(DrafterVersion(1), drafter)
    made.speculation.set_strategy(strategy)
    return made


def decode(
    made: NativeEngine, batch: Sequence[Request], next_policy: Path, next_drafter: Drafter
) -> dict[int, Completion]:
    """Answer all requests; swap the weights and the drafter in the middle of answers."""
    made.submit(batch)
    done: dict[int, Completion] = {}
    steps = 0
    while made.running:
        if steps == SWAPS[0]:
            made.swap_weights(PolicyVersion(1), load_decoder(next_policy, torch.float64).weights)
        if steps == SWAPS[1]:
            made.adopt_drafter(DrafterVersion(2), next_drafter)
        for completion in made.step():
            done[completion.id] = completion
            assert made.hidden_states(completion.id).device == made.embedding_and_head[0].device
        steps += 1
    return done


@pytest.mark.parametrize(
    ("name", "layout", "sampling"),
    [
        ("plain", "eagle", DRAWN),
        ("plain", "eagle", Sampling(temperature=0)),
        ("n-grams", "eagle", DRAWN),
        ("drafter with noise", "eagle", DRAWN),
        ("drafter with noise", "eagle3", Sampling(temperature=0.7, top_k=20, top_p=0.9)),
        ("greedy drafter", "eagle", DRAWN),
    ],
)
def test_answers_are_those_of_the_cpu(
    policy: Path,
    next_policy: Path,
    name: str,
    layout: drafter_models.Layout,
    sampling: Sampling,
) -> None:
    first, second = (drafter_models.random_drafter(layout, seed) for seed in (1, 2))
    batch = requests(sampling, stop_strings=(show([7, 3]),))
    expected = decode(engine(policy, STRATEGIES[name], first, CPU), batch, next_policy, second)
    with labelled_device():
        found = decode(engine(policy, STRATEGIES[name], first, CUDA), batch, next_policy, second)
    assert found.keys() == expected.keys()
    for id, completion in found.items():
        assert completion.tokens == expected[id].tokens
        assert completion.stop == expected[id].stop
        assert completion.logprobs == pytest.approx(expected[id].logprobs, abs=1e-9)
        assert completion.policies == expected[id].policies
        assert completion.drafters == expected[id].drafters
        assert completion.origins == expected[id].origins


# most reads and uploads of a decode step in which no request begins or ends
SYNCS = {
    # which tokens are stop tokens
    "plain": (1, 0),
    # the newest tokens for the index, and the proposals if there are any
    "n-grams": (2, 1),
    "drafter with noise": (1, 0),
    "greedy drafter": (1, 0),
}


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("stop_tokens", [(), (50,)])
def test_a_decode_step_waits_for_the_device_seldom(
    policy: Path, name: str, stop_tokens: tuple[int, ...]
) -> None:
    drafter = drafter_models.random_drafter("eagle", 1)
    prompts = random_prompts(SLOTS, shortest=2)
    first, second = (
        [new_request(10 * turn + i, p, GREEDY, 24, stop_tokens) for i, p in enumerate(prompts)]
        for turn in range(2)
    )
    found: list[tuple[int, int]] = []
    with labelled_device() as device:
        made = engine(policy, STRATEGIES[name], drafter, CUDA)
        # n-grams are proposed from answers to the same prompts
        answers(made, first)
        made.submit(second)
        made.step()
        for _ in range(3):
            device.syncs.clear()
            assert made.step() == []
            found.append((device.count("read", "wait"), device.count("upload")))
    reads, uploads = SYNCS[name]
    if name == "plain" and not stop_tokens:
        reads = 0
    assert max(found) == (reads, uploads)
