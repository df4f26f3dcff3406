"""What is an illness of a drafter, and what is none."""

import math
import random
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from tlt.trainer.drafter.divergence_detector import DivergenceDetector
from tlt.trainer.drafter.drafter_learner import MicroBatchResult


def complaints(covered: Iterable[float]) -> list[str | None]:
    health = DivergenceDetector()
    found: list[str | None] = []
    for part in covered:
        skipped = not math.isfinite(part)
        health.record(MicroBatchResult(rows=1, loss=1.0, overlap=(part, 0.1), skipped=skipped))
        found.append(health.divergence())
    return found


def learned(count: int, high: float = 0.9) -> list[float]:
    """What is covered as it learns: steeply more, then slowly, with noise."""
    dice = random.Random(count)
    return [high * (1 - 0.9 * 0.97**n) * dice.uniform(0.9, 1.1) for n in range(count)]


def test_covering_more_and_more_is_no_illness():
    assert not any(complaints(learned(400)))


@given(covered=st.lists(st.floats(0.5, 1.0), max_size=80))
def test_nor_is_noise(covered: list[float]):
    assert not any(complaints(covered))


@given(covered=st.lists(st.floats(0.0, 0.1), max_size=80))
def test_nor_is_to_know_next_to_nothing(covered: list[float]):
    assert not any(complaints(covered))


def test_some_lessons_that_are_not_finite_are_an_accident_and_many_in_a_row_are_not():
    assert not any(complaints([math.nan, math.inf, math.nan, math.nan, 0.5] * 20))
    *before, last = complaints([*learned(40), *[math.nan] * 5])
    assert not any(before)
    assert last == "5 micro-batches in a row were not finite"


def test_one_outlier_or_a_few_say_nothing():
    assert not any(complaints([*learned(200), *[0.01] * 5, *learned(200)[100:]]))


def test_answers_that_are_harder_than_those_before_say_nothing():
    """However large a part of the loss is the policy's own doubt."""
    health = DivergenceDetector()
    for loss in (*[0.15] * 40, *[4.0] * 40):
        health.record(MicroBatchResult(rows=1, loss=loss, overlap=(0.8,), skipped=False))
        assert health.divergence() is None


def test_a_policy_that_moves_may_be_harder_to_guess():
    assert not any(complaints([*learned(200), *[part - 0.3 for part in learned(200)[150:]]]))


def test_what_falls_far_below_the_best_is_found_soon():
    found = complaints([*learned(200), *[0.1] * 10])
    assert not any(found[:200])
    assert found[-1] == "it covers 10% of the policy's guesses, and covered 95%"


def test_what_was_long_ago_is_forgotten():
    falling = [0.9 - 0.85 * n / 5000 for n in range(5000)]
    assert not any(complaints([*learned(200), *falling]))
