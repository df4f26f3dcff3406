"""The states that a drafter learns from are those of a pass over the whole text."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.engine.conftest import MakeEngine, save_model
from tests.engine.oracle import ask, greedy_answer, random_prompts, transformers_model
from tlt.engine.base import Sampling

pytestmark = pytest.mark.needs("hidden_states")

# the embedding's output, two layers' entrances, and what the final norm makes of the last one's
LAYERS = (0, 1, 2, 3)
# Transformers normalises in float32, whatever the weights are
TOLERANCE = 1e-5


def states_of(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        out = transformers_model(folder)(torch.tensor([list(tokens)]), output_hidden_states=True)
    return torch.stack([out.hidden_states[layer][0] for layer in LAYERS], dim=1)


def test_states_follow_a_request_through_every_slot(make_engine: MakeEngine, folder: Path) -> None:
    prompts = random_prompts(9)
    # siblings share a prefill; rows that end make others move
    requests = [ask(i, prompts[i // 2], Sampling(), 4 + (7 * i) % 11) for i in range(18)]
    engine = make_engine(folder, slots=4, captured=LAYERS)
    assert engine.capabilities.hidden_states
    engine.submit(requests)
    seen: dict[int, torch.Tensor] = {}
    partial = 0
    while engine.running:
        done = engine.step()
        for completion in done:
            request = requests[completion.id]
            text = [*request.prompt, *completion.tokens]
            states = engine.states(completion.id)
            assert states.shape == (len(text) - 1, len(LAYERS), 64)
            assert torch.allclose(states, states_of(folder, text[:-1]), atol=TOLERANCE)
            earlier = seen.pop(completion.id, states[:0])
            assert torch.equal(states[: len(earlier)], earlier)
        for request in requests:
            try:
                seen[request.id] = engine.states(request.id).clone()
                partial += request.id not in {c.id for c in done}
            except KeyError:
                pass
    assert partial > 50


def test_states_are_gone_with_the_next_step(make_engine: MakeEngine, folder: Path) -> None:
    engine = make_engine(folder, captured=LAYERS)
    engine.submit([ask(0, [5, 6, 7], max_new_tokens=1)])
    while not engine.step():
        pass
    assert len(engine.states(0)) == 3
    engine.step()
    with pytest.raises(KeyError):
        engine.states(0)


def test_a_long_prompt_is_cached_beside_those_who_decode(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    folder = save_model(tmp_path, seed=5, max_position_embeddings=2048)
    long = random_prompts(1, shortest=1700, longest=1700)[0]
    engine = make_engine(folder, slots=2, max_context=2048, captured=LAYERS)
    engine.submit([ask(0, (5, 6, 7), max_new_tokens=30)])
    engine.step()
    engine.submit([ask(1, long, max_new_tokens=6)])
    steps, done = 1, engine.step()
    while not done:
        steps, done = steps + 1, engine.step()
    answer = greedy_answer(folder, long, 6)
    assert [(c.id, c.tokens) for c in done] == [(1, answer)]
    expected = states_of(folder, [*long, *answer[:-1]])
    assert torch.allclose(engine.states(1), expected, atol=TOLERANCE)
    # a prompt of 1,700 tokens takes more than one step, and the other gained a token in each
    assert steps > 6
    assert len(engine.states(0)) == 3 + steps
