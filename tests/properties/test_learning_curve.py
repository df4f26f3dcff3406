"""Predictions of a drafter's accept length stay within bounds and recover known curves."""

import math
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties.evaluations import accept_lengths, evaluated_versions
from tlt.base.id_types import DrafterVersion
from tlt.policies.drafter.learning_curve import (
    MOST_EVALUATIONS,
    EvaluatedVersion,
    fit_curve,
    lift_plateau,
)


@given(
    start=st.none() | accept_lengths,
    evaluations=evaluated_versions,
    micro_batches=st.lists(st.floats(0.0, 1e9), min_size=2, max_size=6).map(sorted),
)
def test_predicts_rising_lengths_between_now_and_the_plateau(
    start: float | None, evaluations: list[EvaluatedVersion], micro_batches: list[float]
) -> None:
    found = fit_curve(start, evaluations)
    predicted = [found.after(more) for more in micro_batches]
    assert all(math.isfinite(length) for length in predicted)
    assert all(a <= b + 1e-9 for a, b in pairwise(predicted))
    assert found.now - 1e-9 <= predicted[0]
    assert predicted[-1] <= found.plateau + 1e-9
    assert found.after(0.0) == pytest.approx(found.now)


def _measured(
    began: float,
    plateau: float,
    span: float,
    *,
    noise: float = 0.0,
    seed: int = 0,
    evaluations: int = 30,
) -> list[EvaluatedVersion]:
    dice = Random(seed)
    lengths = [
        plateau - (plateau - began) * math.exp(-24 * i / span) for i in range(evaluations + 1)
    ]
    lengths = [max(1.0, length + dice.gauss(0.0, noise)) for length in lengths]
    return [
        EvaluatedVersion(
            version=DrafterVersion(0),
            micro_batches=24 * (i + 1),
            accept_length_before=used,
            accept_length=trained,
        )
        for i, (used, trained) in enumerate(pairwise(lengths))
    ]


@given(
    plateau=st.floats(2.0, 8.0),
    span=st.floats(60.0, 600.0),
    seed=st.integers(0, 10),
    half=st.booleans(),
)
def test_recovers_a_known_curve_from_noisy_evaluations(
    plateau: float, span: float, seed: int, half: bool
) -> None:
    """Predict the accept length ten evaluations ahead, from thirty of them or from fifteen."""
    evaluations = _measured(1.0, plateau, span, noise=0.1, seed=seed)
    seen = evaluations[: 15 if half else 30]
    left = math.exp(-24 * (len(seen) + 10) / span)
    truth = plateau - (plateau - 1.0) * left
    assert fit_curve(1.0, seen).after(240) == pytest.approx(truth, abs=0.45 + 0.08 * plateau)


@given(length=st.floats(1.5, 6.0), seed=st.integers(0, 10), noise=st.sampled_from([0.0, 0.05]))
def test_expects_no_gain_of_a_trained_drafter_that_stopped_improving(
    length: float, seed: int, noise: float
) -> None:
    dice = Random(seed)
    evaluations = [
        EvaluatedVersion(
            version=DrafterVersion(0),
            micro_batches=3000 + 24 * i,
            accept_length_before=length,
            accept_length=length + dice.gauss(0.0, noise),
        )
        for i in range(1, 9)
    ]
    found = fit_curve(length, evaluations)
    assert found.after(24) - found.now < 0.15
    assert found.after(1000) - found.now < 0.35


@given(
    start=st.none() | accept_lengths,
    evaluations=evaluated_versions,
    micro_batches=st.floats(0.0, 1e9),
)
def test_lifted_curve_predicts_no_less(
    start: float | None, evaluations: list[EvaluatedVersion], micro_batches: float
) -> None:
    found = fit_curve(start, evaluations)
    lifted = lift_plateau(found)
    assert math.isfinite(lifted.after(micro_batches))
    assert lifted.plateau >= found.plateau
    assert lifted.now - 1e-9 <= lifted.after(micro_batches) <= lifted.plateau + 1e-9


def test_ignores_evaluations_beyond_the_newest_ones() -> None:
    evaluations = _measured(1.0, 5.0, 200.0, evaluations=100)
    assert fit_curve(1.0, evaluations) == fit_curve(1.0, evaluations[-MOST_EVALUATIONS:])
