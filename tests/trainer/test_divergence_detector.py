"""The detector finds divergence and has no false alarms."""

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
    """Return noisy overlaps that rise steeply, then slowly."""
    rng = random.Random(count)
    return [high * (1 - 0.9 * 0.97**n) * rng.uniform(0.9, 1.1) for n in range(count)]


def test_rising_overlap_is_sound():
    assert not any(complaints(learned(400)))


@given(covered=st.lists(st.floats(0.5, 1.0), max_size=80))
def test_noisy_overlap_is_sound(covered: list[float]):
    assert not any(complaints(covered))


@given(covered=st.lists(st.floats(0.0, 0.1), max_size=80))
def test_overlap_near_zero_from_the_start_is_sound(covered: list[float]):
    assert not any(complaints(covered))


def test_five_skipped_updates_in_a_row_are_a_divergence():
    assert not any(complaints([math.nan, math.inf, math.nan, math.nan, 0.5] * 20))
    *before, last = complaints([*learned(40), *[math.nan] * 5])
    assert not any(before)
    assert last == "5 micro-batches in a row were not finite"


def test_ignores_a_few_outliers():
    assert not any(complaints([*learned(200), *[0.01] * 5, *learned(200)[100:]]))


def test_ignores_a_loss_that_rises_with_harder_answers():
    """The policy's entropy may be any part of the loss."""
    health = DivergenceDetector()
    for loss in (*[0.15] * 40, *[4.0] * 40):
        health.record(MicroBatchResult(rows=1, loss=loss, overlap=(0.8,), skipped=False))
        assert health.divergence() is None


def test_tolerates_a_policy_that_becomes_harder_to_guess():
    assert not any(complaints([*learned(200), *[part - 0.3 for part in learned(200)[150:]]]))


def test_detects_an_overlap_far_below_the_best():
    found = complaints([*learned(200), *[0.1] * 10])
    assert not any(found[:200])
    assert found[-1] == "it covers 10% of the policy's guesses, and covered 95%"


def test_forgets_an_old_best():
    falling = [0.9 - 0.85 * n / 5000 for n in range(5000)]
    assert not any(complaints([*learned(200), *falling]))
