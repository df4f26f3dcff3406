"""Idle workers train as long as evaluations get better, rest when they don't, and try again."""

import math

import pytest
from hypothesis import given, settings

from tests.properties.evaluations import evaluated_versions
from tests.simulation.specs import base_with, small_spec
from tlt.base.id_types import Step
from tlt.policies.drafter import training_evidence
from tlt.policies.drafter.training_evidence import (
    EvaluatedVersion,
    Judgement,
    TrainingEvidence,
    judge_evaluation,
    judge_idle_training,
    record_evaluation,
    record_failure,
    record_success,
)
from tlt.protocol.shared_values import DrafterEvaluation

_NOTHING = TrainingEvidence()


def _measured(before: float | None, after: float, answers: int = 4) -> DrafterEvaluation:
    return DrafterEvaluation(accept_length_before=before, accept_length=after, answers=answers)


def _evaluate(
    evidence: TrainingEvidence, evaluation: DrafterEvaluation, step: int
) -> TrainingEvidence:
    after = record_evaluation(evidence, evaluation, base_with(24))
    if judge_evaluation(evaluation) is Judgement.ADOPT:
        return record_success(after, Step(step))
    return record_failure(after, Step(step))


def _trains(evidence: TrainingEvidence, step: int, to_come: int = 9) -> bool:
    spec = small_spec(steps=1000, train="auto")
    return judge_idle_training(spec, evidence, Step(step), to_come).worth


def test_trains_at_a_cold_start_and_nothing_at_the_last_step() -> None:
    assert _trains(_NOTHING, 0)
    assert not _trains(_NOTHING, 999, to_come=0)


def test_trains_on_while_one_of_the_last_three_evaluations_gained() -> None:
    evidence = _evaluate(_NOTHING, _measured(None, 1.4), 0)
    for step in (1, 2):
        evidence = _evaluate(evidence, _measured(1.4, 1.3), step)
        assert _trains(evidence, step)
    evidence = _evaluate(evidence, _measured(1.4, 1.4), 3)
    assert not _trains(evidence, 3)
    assert _trains(evidence, 4)


def test_rests_longer_after_each_failure_up_to_a_limit() -> None:
    evidence, step, rests = _NOTHING, 0, list[int]()
    for _ in range(100):
        evidence = _evaluate(evidence, _measured(3.0, 2.9), step)
        assert not any(_trains(evidence, pause) for pause in range(step, evidence.rests_until))
        assert _trains(evidence, evidence.rests_until)
        rests.append(evidence.rests_until - step)
        step = evidence.rests_until
    assert rests[:7] == [0, 0, 1, 2, 4, 8, 8]
    assert rests == sorted(rests)
    better = _evaluate(evidence, _measured(2.9, 3.2), step)
    assert better.failures == 0
    assert _trains(better, step)


@given(evaluations=evaluated_versions)
@settings(max_examples=40)
def test_obeys_always_and_off(evaluations: list[EvaluatedVersion]) -> None:
    evidence = _NOTHING
    for each in evaluations:
        evaluation = _measured(each.accept_length_before, each.accept_length)
        evidence = _evaluate(evidence, evaluation, 0)
    assert len(evidence.evaluations) <= training_evidence.MOST_EVALUATIONS
    for to_come in (0, 9):
        always, off = small_spec(steps=9, train="always"), small_spec(steps=9, train="off")
        assert judge_idle_training(always, evidence, Step(0), to_come).worth
        assert not judge_idle_training(off, evidence, Step(0), to_come).worth


@pytest.mark.parametrize(
    ("used", "trained", "judgement"),
    [
        (None, 1.0, Judgement.REJECT),
        (None, 1.2, Judgement.ADOPT),
        (2.0, 2.1, Judgement.ADOPT),
        (2.0, 2.0, Judgement.REJECT),
        (2.0, 1.9, Judgement.REJECT),
        (2.0, 1.7, Judgement.RESTART),
        (2.0, math.nan, Judgement.UNMEASURED),
        (2.0, math.inf, Judgement.UNMEASURED),
    ],
)
def test_adopts_better_drafters_and_restarts_much_worse_ones(
    used: float | None, trained: float, judgement: Judgement
) -> None:
    assert judge_evaluation(_measured(used, trained)) is judgement
    assert judge_evaluation(_measured(used, trained, answers=0)) is Judgement.UNMEASURED
