from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.drafters import samples, whole
from tlt.trainer.drafter.micro_batches import Window, shuffled_micro_batches
from tlt.trainer.drafter.samples import DrafterSample


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 20), budget=st.integers(1, 60), seed=st.integers(0, 99))
def test_every_row_comes_once_before_it_repeats(count: int, budget: int, seed: int):
    chosen = samples("eagle", count, seed)
    left = {
        (index, row)
        for index, sample in enumerate(chosen)
        # prompts of samples beyond the budget are left out
        for row in range(0 if sample.rows <= budget else sample.first, sample.rows)
    }
    batches = shuffled_micro_batches(chosen, budget, seed)
    while left:
        made = next(batches)
        assert sum(window.rows for window in made) <= budget
        assert len(made) == 1 or all(window.first == 0 for window in made)
        for window in made:
            rows = {(window.sample, row) for row in range(window.first, window.last)}
            assert rows <= left
            left -= rows


def test_seed_decides_the_order_and_each_pass_has_another_one():
    chosen = samples("eagle", 12)

    def first(seed: int) -> list[list[Window]]:
        return list(islice(shuffled_micro_batches(chosen, 40, seed), 9))

    assert first(1) == first(1)
    assert first(1) != first(2)
    assert first(1)[:3] != first(1)[-3:]


def test_measures_guesses_of_tokens_that_the_policy_chose():
    chosen = samples("eagle", 8)
    made = whole(chosen, 3)
    ends = made.bounds.tolist()
    for sample, first, last in zip(chosen, ends, ends[1:], strict=False):
        for step in range(3):
            measurable = made.measurable[step, first:last].nonzero()[:, 0].tolist()
            # the token that a chain from this row would guess at this step
            guessed = [row + step + 2 for row in measurable]
            expected = range(max(sample.prompt, 2) + step, len(sample.tokens))
            assert guessed == list(expected)
            for row, token in zip(measurable, guessed, strict=True):
                assert made.tokens[step, first + row] == sample.tokens[token - 1]
                aim = made.states[made.targets[step, first + row]]
                torch.testing.assert_close(aim, sample.states[token - 1])


@pytest.mark.parametrize(
    ("tokens", "prompt", "states", "complaint"),
    [
        ([1, 2], 1, (1, 1, 4), "three tokens"),
        ([1, 2, 3], 0, (2, 1, 4), "a prompt"),
        ([1, 2, 3], 3, (2, 1, 4), "an answer"),
        ([1, 2, 3], 1, (3, 1, 4), "all its tokens but the last"),
    ],
)
def test_refuses_a_sample_without_measurable_guesses(
    tokens: list[int], prompt: int, states: tuple[int, ...], complaint: str
):
    with pytest.raises(ValueError, match=complaint):
        DrafterSample(tokens=tokens, prompt=prompt, states=torch.zeros(states))
