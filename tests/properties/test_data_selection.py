"""Answers are drawn and evicted by their weights, and held out by their prompts."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt.base.id_types import Member, PromptIndex, Step
from tlt.policies.drafter.data_selection import (
    Candidate,
    choose_evictions,
    choose_held_out,
    draw_answers,
    is_held_out,
)

_candidates = st.lists(
    st.builds(
        Candidate,
        origin=st.sampled_from(["own", "others", "unfinished", "earlier"]),
        tokens=st.integers(1, 4000),
        bytes=st.integers(0, 10_000),
        step=st.integers(0, 3),
        taken=st.integers(0, 5),
    ),
    max_size=30,
)


@given(candidates=_candidates, most=st.integers(0, 200_000))
def test_evicts_just_enough_answers_to_fit(candidates: list[Candidate], most: int) -> None:
    evicted = choose_evictions(candidates, Step(3), most)
    assert len(set(evicted)) == len(evicted)
    kept = sum(c.bytes for i, c in enumerate(candidates) if i not in evicted)
    assert kept <= most
    if evicted:
        assert kept + candidates[evicted[-1]].bytes > most


@given(candidates=_candidates, most=st.integers(1, 8000), seed=st.integers(0, 99))
def test_draws_no_answer_twice_and_fills_the_token_budget(
    candidates: list[Candidate], most: int, seed: int
) -> None:
    dice = Random(seed)
    chosen = draw_answers(candidates, Step(3), most, [dice.random() for _ in range(64)])
    assert len(set(chosen)) == len(chosen)
    assert bool(chosen) == bool(candidates)
    # the first may have any length; the others fit into the rest of the budget
    assert sum(candidates[i].tokens for i in chosen[1:]) <= max(
        0, most - sum(candidates[i].tokens for i in chosen[:1])
    )
    room = most - sum(candidates[i].tokens for i in chosen)
    assert not any(c.tokens <= room for i, c in enumerate(candidates) if i not in chosen)


def test_draws_old_and_often_drawn_answers_less() -> None:
    def one(tokens: int, step: int = 3, taken: int = 0) -> Candidate:
        return Candidate(origin="own", tokens=tokens, bytes=1, step=Step(step), taken=taken)

    def share(first: Candidate, second: Candidate) -> float:
        dice = Random(0)
        draws = [draw_answers([first, second], Step(3), 1, [dice.random()])[0] for _ in range(2000)]
        return 1.0 - sum(draws) / len(draws)

    assert share(one(400), one(100)) == pytest.approx(8 / 9, abs=0.03)
    assert share(one(100), one(100, taken=1)) == pytest.approx(2 / 3, abs=0.04)
    assert share(one(100), one(100, step=2)) == pytest.approx(1 / 1.85, abs=0.04)
    assert share(one(100, taken=3000), one(100, taken=3000)) == pytest.approx(0.5, abs=0.04)


@given(
    step=st.integers(0, 1000),
    numbers=st.lists(st.integers(0, 10**6), min_size=1, max_size=200, unique=True),
)
def test_holds_out_one_prompt_in_eight_in_whatever_order_they_come(
    step: int, numbers: list[int]
) -> None:
    prompts = [PromptIndex(prompt) for prompt in numbers]
    held = choose_held_out(Step(step), prompts)
    assert set(held) < set(prompts)
    assert len(set(held)) == len(held)
    assert len(held) == (0 if len(prompts) == 1 else min(max(1, len(prompts) // 8), 8))
    assert set(held) == set(choose_held_out(Step(step), prompts[::-1]))
    for prompt in prompts if held else ():
        assert is_held_out(held, Step(step), prompt, Member(3)) == (prompt in held)


def test_holds_out_each_prompt_in_some_step() -> None:
    prompts = [PromptIndex(n) for n in range(16)]
    held = [prompt for step in range(400) for prompt in choose_held_out(Step(step), prompts)]
    assert all(30 < held.count(prompt) < 75 for prompt in prompts)


def test_holds_out_one_answer_in_eight_of_a_single_prompt() -> None:
    answers = [(Step(s), PromptIndex(4), Member(m)) for s in range(40) for m in range(64)]
    held = [is_held_out((), *answer) for answer in answers]
    assert sum(held) / len(held) == pytest.approx(1 / 8, abs=0.02)
    assert held == [is_held_out((), *answer) for answer in answers]
