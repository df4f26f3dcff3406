"""Every request is returned exactly once, with the reason why it ended."""

from pathlib import Path

import pytest

from tests.engine.conftest import MakeEngine
from tests.engine.reference import (
    answers,
    finish,
    greedy_answer,
    new_request,
    random_prompts,
    show,
)
from tlt.engine.base import Request
from tlt.errors import ConfigError

PROMPT = random_prompts(1, shortest=8)[0]


def test_a_stop_token_is_included(make_engine: MakeEngine, folder: Path) -> None:
    whole = greedy_answer(folder, PROMPT, 20)
    stop = whole[9]
    # a sibling with more stop tokens, none of which appears
    unused = set(range(97)) - set(whole)
    requests = [
        new_request(0, PROMPT, stop_tokens=[stop]),
        new_request(1, PROMPT, stop_tokens=unused),
        new_request(2, PROMPT),
    ]
    done = answers(make_engine(folder), requests)
    assert done[0].tokens == whole[: whole.index(stop) + 1]
    assert [done[i].stop for i in range(3)] == ["stop", "length", "length"]
    assert done[1].tokens == done[2].tokens == whole


def test_a_stop_string_may_span_tokens(make_engine: MakeEngine, folder: Path) -> None:
    whole = greedy_answer(folder, PROMPT, 20)
    stop = f"{whole[10]}><{whole[11]}>"
    requests = [
        new_request(0, PROMPT, stop_strings=("never", stop)),
        new_request(1, PROMPT, stop_strings=("never",)),
        new_request(2, PROMPT),
    ]
    done = answers(make_engine(folder), requests)
    assert stop in done[0].text
    assert stop not in show(done[0].tokens[:-1])
    assert [done[i].stop for i in range(3)] == ["stop", "length", "length"]
    assert done[0].text == show(done[0].tokens)
    assert done[1].tokens == whole


def test_a_full_context_ends_an_answer(make_engine: MakeEngine, folder: Path) -> None:
    engine = make_engine(folder, max_context=len(PROMPT) + 6)
    requests = [
        new_request(0, PROMPT, max_new_tokens=50),
        new_request(1, PROMPT[:4], max_new_tokens=2),
        new_request(2, [*PROMPT, *greedy_answer(folder, PROMPT, 5)]),
    ]
    done = answers(engine, requests)
    assert [(len(done[i].tokens), done[i].stop) for i in range(3)] == [
        (6, "length"),
        (2, "length"),
        (1, "length"),
    ]
    assert done[2].tokens == greedy_answer(folder, PROMPT, 6)[5:]


def test_cancelled_requests_come_out_of_the_next_step(
    make_engine: MakeEngine, folder: Path
) -> None:
    engine = make_engine(folder, slots=2)
    prompts = random_prompts(4)
    # in engines with only two slots the last requests wait
    engine.submit([new_request(i, p, max_new_tokens=100) for i, p in enumerate(prompts)])
    for _ in range(3):
        assert engine.step() == []
    assert engine.running == 4
    engine.cancel([0, 3, 99])
    assert engine.running == 2
    out = {c.id: c for c in engine.step()}
    assert {i: c.stop for i, c in out.items()} == {0: "cancelled", 3: "cancelled"}
    for i, c in out.items():
        assert len(c.tokens) == len(c.logprobs) < 100
        assert c.tokens == greedy_answer(folder, prompts[i], 100)[: len(c.tokens)]
    rest = finish(engine)
    assert {i: (c.stop, len(c.tokens)) for i, c in rest.items()} == {
        1: ("length", 100),
        2: ("length", 100),
    }
    # nothing of the cancelled requests remains in the slots
    alone = new_request(0, prompts[0], max_new_tokens=5)
    assert answers(engine, [alone])[0].tokens == greedy_answer(folder, prompts[0], 5)


def test_accepts_more_slots_than_positions(make_engine: MakeEngine, folder: Path) -> None:
    requests = [new_request(i, PROMPT[:3], max_new_tokens=3) for i in range(12)]
    done = answers(make_engine(folder, slots=12, max_context=6), requests)
    assert {tuple(c.tokens) for c in done.values()} == {tuple(greedy_answer(folder, PROMPT[:3], 3))}


def test_an_idle_engine_returns_nothing(make_engine: MakeEngine, folder: Path) -> None:
    engine = make_engine(folder)
    assert engine.running == 0
    assert engine.step() == []


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (new_request(5, [1] * 16), "a prompt of 16 tokens doesn't fit"),
        (new_request(5, []), "a prompt of 0 tokens doesn't fit"),
        (new_request(5, [96, 97]), "outside the model's vocabulary of 97"),
        (new_request(5, [1], max_new_tokens=0), "max_new_tokens must be at least 1"),
        (new_request(0, [1]), "two requests of the same id"),
    ],
)
def test_refuses_impossible_requests_at_once(
    make_engine: MakeEngine, folder: Path, bad: Request, complaint: str
) -> None:
    engine = make_engine(folder, max_context=16)
    with pytest.raises(ConfigError, match=complaint):
        engine.submit([new_request(0, [1, 2]), bad])
    assert engine.running == 0
    assert len(answers(engine, [new_request(0, [1, 2], max_new_tokens=3)])[0].tokens) == 3


def test_spans_add_up_to_the_answer(make_engine: MakeEngine, folder: Path) -> None:
    requests = [
        new_request(i, p, max_new_tokens=3 + 4 * i) for i, p in enumerate(random_prompts(5))
    ]
    done = answers(make_engine(folder, slots=3), requests)
    for c in done.values():
        assert sum(span.tokens for span in c.batches) == len(c.tokens) == len(c.logprobs)
        assert [(s.version, s.tokens) for s in c.policies] == [(0, len(c.tokens))]
        assert all(span.size >= 1 for span in c.batches)
        assert c.decode_seconds > 0


@pytest.mark.needs("token_identical")
def test_spans_record_the_batch_size(make_engine: MakeEngine, folder: Path) -> None:
    requests = [
        new_request(i, p, max_new_tokens=3 + 4 * i) for i, p in enumerate(random_prompts(5))
    ]
    done = answers(make_engine(folder, slots=3), requests)
    # 3 and 4 take the slots of 0 (after 3 steps) and 1 (after 7)
    assert [(s.size, s.tokens) for s in done[2].batches] == [(3, 11)]
    assert [(s.size, s.tokens) for s in done[4].batches] == [(3, 4), (2, 7), (1, 8)]
