"""What is an illness of a drafter, and what is none."""

import math
import random
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from tlt.learn.drafter.health import Health
from tlt.learn.drafter.learner import Lesson


def complaints(losses: Iterable[float]) -> list[str | None]:
    health = Health()
    found: list[str | None] = []
    for loss in losses:
        skipped = not math.isfinite(loss)
        health.note(Lesson(rows=1, loss=loss, overlap=(0.5,), skipped=skipped))
        found.append(health.complaint())
    return found


def learned(count: int, low: float = 0.3) -> list[float]:
    """As losses fall: steeply, then slowly, with noise."""
    dice = random.Random(count)
    return [low + 3 * 0.97**n * dice.uniform(0.7, 1.3) for n in range(count)]


def test_a_loss_that_falls_is_no_illness():
    assert not any(complaints(learned(400)))


@given(losses=st.lists(st.floats(0.1, 0.6), max_size=80))
def test_nor_is_noise(losses: list[float]):
    assert not any(complaints(losses))


def test_some_lessons_that_are_not_finite_are_an_accident_and_many_in_a_row_are_not():
    assert not any(complaints([math.nan, math.inf, math.nan, math.nan, 1.0] * 20))
    *before, last = complaints([*learned(40), *[math.nan] * 5])
    assert not any(before)
    assert last == "5 lessons in a row were not finite"


def test_one_outlier_or_a_few_say_nothing():
    assert not any(complaints([*learned(200), *[40.0] * 5, *learned(200)[100:]]))


def test_a_policy_that_moves_may_be_harder_to_guess():
    assert not any(complaints([*learned(200), *[loss + 0.4 for loss in learned(200)[150:]]]))


def test_a_rise_well_above_the_best_is_found_soon():
    found = complaints([*learned(200), *[3.0] * 10])
    assert not any(found[:200])
    assert found[-1] == "its loss is 3.00, and was 0.33"


def test_what_was_long_ago_is_forgotten():
    rising = [0.3 + 2.0 * n / 5000 for n in range(5000)]
    assert not any(complaints([*learned(200), *rising]))
