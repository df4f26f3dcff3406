"""A request in a reused slot finds no hidden states of the slot's earlier requests."""

from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest
import torch

from tests.engine.conftest import save_model
from tests.engine.drafter_models import policy_states
from tests.engine.reference import answers, finish, greedy_answer, new_request, random_prompts
from tests.sglang.speculating import start_engine
from tlt.base.id_types import PolicyVersion
from tlt.engine.base import Completion, Request, Sampling
from tlt.engine.sglang.client.engine import SglangEngine
from tlt.models.decoder_from_folder import load_decoder

pytestmark = pytest.mark.sglang

STUCK_SECONDS = 30.0


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # stop tokens in the model's configuration that no request names
    return save_model(tmp_path_factory.mktemp("policy"), seed=1, eos_token_id=list(range(40)))


@pytest.fixture(scope="module")
def engine(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    folder = tmp_path_factory.mktemp("sglang")
    options = {"captured": (1, 2, 3), "stuck_seconds": STUCK_SECONDS}
    engine = start_engine(policy, folder, slots=2, **options)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def _first_weights(engine: SglangEngine, policy: Path) -> None:
    engine.swap_weights(PolicyVersion(0), load_decoder(policy).weights)


def right(engine: SglangEngine, policy: Path, request: Request, done: Completion) -> bool:
    text = torch.tensor([[*request.prompt, *done.tokens][:-1]])
    expected, _ = policy_states(policy, text)
    states = engine.hidden_states(done.id)
    if states.shape != expected[0].shape:
        return False
    error = (states - expected[0]).norm(dim=-1) / expected[0].norm(dim=-1)
    return bool((error < 1e-5).all())


def test_reused_slot_holds_only_its_requests_states(engine: SglangEngine, policy: Path) -> None:
    prompts = random_prompts(10, shortest=2)
    requests = {i: new_request(i, prompts[i // 3], Sampling(), 3 + (7 * i) % 30) for i in range(30)}
    engine.submit(list(requests.values()))
    ended = 0
    while engine.running:
        done = engine.step()
        for completion in done:
            assert right(engine, policy, requests[completion.id], completion)
            assert all(span.size <= 2 for span in completion.batches)
        ended += len(done)
        # requests that were just admitted have no states, not even older ones of their slots
        for id, request in requests.items():
            try:
                known = len(engine.hidden_states(id))
            except KeyError:
                continue
            assert known <= len(request.prompt) + request.max_new_tokens - 1
    assert ended == 30


def test_states_after_a_swap_come_from_the_new_policy(
    engine: SglangEngine, policy: Path, tmp_path: Path
) -> None:
    other = save_model(tmp_path, seed=2)
    prompt = random_prompts(1, shortest=12)[0]
    answers(engine, [new_request(0, prompt, max_new_tokens=4)])
    engine.swap_weights(PolicyVersion(1), load_decoder(other).weights)
    requests = {i: new_request(i, prompt, Sampling(), 4) for i in range(1, 7)}
    engine.submit(list(requests.values()))
    seen = 0
    while engine.running:
        for completion in engine.step():
            assert right(engine, other, requests[completion.id], completion)
            seen += 1
    assert seen == 6


def test_queued_requests_start_with_the_new_policy_after_a_swap(
    engine: SglangEngine, policy: Path, tmp_path: Path
) -> None:
    other = save_model(tmp_path, seed=2)
    first, second = random_prompts(2, shortest=12)
    answers(engine, [new_request(0, second, max_new_tokens=2)])
    engine.submit([new_request(i, first, max_new_tokens=90) for i in (1, 2)])
    engine.submit([new_request(i, second, max_new_tokens=8) for i in (3, 4, 5)])
    engine.step()
    engine.swap_weights(PolicyVersion(1), load_decoder(other).weights)
    done = finish(engine)
    for i in (3, 4, 5):
        assert [(span.version, span.tokens) for span in done[i].policies] == [(1, 8)]
        assert done[i].tokens == greedy_answer(other, second, 8)


def test_cancels_queued_and_running_requests_together(engine: SglangEngine, policy: Path) -> None:
    engine.submit([new_request(i, p, max_new_tokens=100) for i, p in enumerate(random_prompts(9))])
    engine.step()
    engine.cancel([0, 8])
    assert {c.id: c.stop for c in engine.step()} == {0: "cancelled", 8: "cancelled"}
    # some were just admitted and not sent yet
    engine.cancel(range(9))
    assert {c.stop for c in engine.step()} == {"cancelled"}
    assert engine.running == 0


def test_a_cancelled_request_goes_on_from_the_tokens_that_it_drew(
    engine: SglangEngine, policy: Path
) -> None:
    (prompt,) = random_prompts(1)
    expected = greedy_answer_of(policy, prompt, 100)
    engine.submit([new_request(0, prompt, max_new_tokens=100)])
    while len(engine.partial_answer(0) or []) < 5:
        assert engine.step() == []
    engine.cancel([0])
    (cut,) = engine.step()
    assert 5 <= len(cut.tokens) == len(cut.logprobs) < 100
    rest = new_request(1, (*prompt, *cut.tokens), max_new_tokens=100 - len(cut.tokens))
    assert cut.tokens + answers(engine, [rest])[1].tokens == expected


def test_request_ends_only_at_its_own_stop_conditions(engine: SglangEngine, policy: Path) -> None:
    prompts = random_prompts(6)
    done = answers(
        engine,
        [new_request(i, p, stop_tokens=[96], max_new_tokens=30) for i, p in enumerate(prompts)],
    )
    for i, prompt in enumerate(prompts):
        whole = greedy_answer_of(policy, prompt)
        end = whole.index(96) + 1 if 96 in whole else len(whole)
        assert done[i].tokens == whole[:end]


def greedy_answer_of(policy: Path, prompt: tuple[int, ...], count: int = 30) -> list[int]:
    """Return the greedy answer, ignoring the stop tokens of the model's configuration."""
    tokens = list(prompt)
    for _ in range(count):
        _, logits = policy_states(policy, torch.tensor([tokens]))
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_idle_time_is_not_counted_as_a_stall(
    engine: SglangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(engine, [new_request(0, [5, 6], max_new_tokens=2)])
    late = monotonic() + 2 * STUCK_SECONDS
    monkeypatch.setattr("tlt.engine.sglang.client.stuck_watch.monotonic", lambda: late)
    assert len(answers(engine, [new_request(1, [5, 6, 7], max_new_tokens=40)])[1].tokens) == 40
