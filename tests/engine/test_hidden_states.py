"""Captured hidden states equal those of a single pass over the whole text."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.engine.conftest import MakeEngine, save_model
from tests.engine.reference import greedy_answer, new_request, random_prompts, transformers_model
from tlt.engine.base import Sampling

pytestmark = pytest.mark.needs("hidden_states")

# the inputs of two layers, and the last layer's output after the final norm
LAYERS = (1, 2, 3)
# relative error of a state; Transformers normalises in float32 for any weights
TOLERANCE = 1e-5
LONG = random_prompts(1, shortest=1700, longest=1700)[0]


def states_of(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        out = transformers_model(folder)(torch.tensor([list(tokens)]), output_hidden_states=True)
    return torch.stack([out.hidden_states[layer][0] for layer in LAYERS], dim=1)


def near(states: torch.Tensor, expected: torch.Tensor) -> bool:
    error = (states.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    return states.shape == expected.shape and bool((error < TOLERANCE).all())


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("long"), seed=5, max_position_embeddings=2048)


def test_states_follow_a_request_through_every_slot(make_engine: MakeEngine, folder: Path) -> None:
    prompts = random_prompts(9)
    # siblings share a prefill, and rows that end make others move
    requests = [new_request(i, prompts[i // 2], Sampling(), 4 + (7 * i) % 11) for i in range(18)]
    engine = make_engine(folder, slots=4)
    assert engine.capabilities.hidden_states
    engine.submit(requests)
    seen: dict[int, torch.Tensor] = {}
    partial = 0
    while engine.running:
        done = engine.step()
        for completion in done:
            request = requests[completion.id]
            text = [*request.prompt, *completion.tokens]
            states = engine.hidden_states(completion.id)
            assert states.shape == (len(text) - 1, len(LAYERS), 64)
            assert near(states, states_of(folder, text[:-1]))
            earlier = seen.pop(completion.id, states[:0])
            assert torch.equal(states[: len(earlier)], earlier)
        for request in requests:
            try:
                seen[request.id] = engine.hidden_states(request.id).clone()
                partial += request.id not in {c.id for c in done}
            except KeyError:
                pass
    # how many depends on when SGLang's process was looked at
    assert partial


def test_states_are_valid_until_the_next_step(make_engine: MakeEngine, folder: Path) -> None:
    engine = make_engine(folder)
    engine.submit([new_request(0, [5, 6, 7], max_new_tokens=1)])
    while not engine.step():
        pass
    assert len(engine.hidden_states(0)) == 3
    engine.step()
    with pytest.raises(KeyError):
        engine.hidden_states(0)


@pytest.mark.needs("token_identical")
def test_cancelled_request_has_no_states(make_engine: MakeEngine, folder: Path) -> None:
    """Its slot belongs to the next request at once."""
    engine = make_engine(folder, slots=1)
    engine.submit([new_request(0, [5, 6, 7]), new_request(1, [8, 9])])
    for _ in range(3):
        engine.step()
    engine.cancel([0])
    assert [c.id for c in engine.step()] == [0]
    assert len(engine.hidden_states(1)) == 2
    with pytest.raises(KeyError):
        engine.hidden_states(0)


def test_prefills_a_long_prompt_in_chunks(make_engine: MakeEngine, long_folder: Path) -> None:
    engine = make_engine(long_folder, slots=2, max_context=2048)
    engine.submit([new_request(0, LONG, max_new_tokens=6)])
    while not (done := engine.step()):
        pass
    answer = greedy_answer(long_folder, LONG, 6)
    assert done[0].tokens == answer
    assert near(engine.hidden_states(0), states_of(long_folder, [*LONG, *answer[:-1]]))


@pytest.mark.needs("token_identical")
def test_decodes_other_requests_between_chunks_of_a_long_prompt(
    make_engine: MakeEngine, long_folder: Path
) -> None:
    engine = make_engine(long_folder, slots=2, max_context=2048)
    engine.submit([new_request(0, (5, 6, 7), max_new_tokens=30)])
    engine.step()
    engine.submit([new_request(1, LONG, max_new_tokens=6)])
    steps, done = 1, engine.step()
    while not done:
        steps, done = steps + 1, engine.step()
    assert [c.id for c in done] == [1]
    # the prompt of 1,700 tokens takes several steps, and the other request gains a token in each
    assert steps > 6
    assert len(engine.hidden_states(0)) == 3 + steps
