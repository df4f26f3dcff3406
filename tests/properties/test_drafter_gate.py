"""The gate trains drafters where that pays, and predictions are finite and bounded."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.properties.evaluations import evaluated_versions
from tests.properties.test_speedup_model import control_runs, decoded, with_ngrams
from tests.samples import tally
from tests.simulation.specs import base_with, small_spec
from tlt.base.id_types import DrafterVersion, Step
from tlt.base.strategies import Draft
from tlt.policies.drafter import speedup_model
from tlt.policies.drafter import training_payoff_gate as gate
from tlt.policies.drafter.learning_curve import EvaluatedVersion
from tlt.policies.drafter.payoff_evidence import (
    PayoffEvidence,
    record_evaluation,
    record_failure,
    record_named_live,
    record_speedup,
    record_success,
    refit_named,
)
from tlt.policies.drafter.training_payoff_gate import Judgement, TrainingOutlook
from tlt.policies.drafter.training_totals import TrainingProgress
from tlt.policies.speculation.savings_estimate import DecodeAccount
from tlt.protocol.shared_values import DrafterEvaluation, StrategyTally
from tlt.spec.config import JobSpec

_NOTHING = PayoffEvidence()


def _outlook(steps: int, rollout_seconds: float, **changes: Any) -> TrainingOutlook:
    """Return the gate's outlook at the first step, with two members."""
    values: dict[str, Any] = {
        "step": Step(0),
        "newest_step": Step(0),
        "members": 2,
        "micro_batches_per_second": 10.0,
        "speedup_without_drafter": 1.25,
    }
    return TrainingOutlook(
        steps=steps, rollout_seconds=max(0.0, rollout_seconds), **{**values, **changes}
    )


def _version(
    version: int, micro_batches: int, before: float | None, after: float
) -> EvaluatedVersion:
    return EvaluatedVersion(
        version=DrafterVersion(version),
        micro_batches=micro_batches,
        accept_length_before=before,
        accept_length=after,
    )


def _measured(before: float | None, after: float, answers: int) -> DrafterEvaluation:
    return DrafterEvaluation(accept_length_before=before, accept_length=after, answers=answers)


def _ahead(spec: JobSpec, opened: int, seconds: float = 60.0, **changes: Any) -> TrainingOutlook:
    left = max(0, spec.algorithm.steps - opened - 1)
    speedup = speedup_model.without_drafter(spec, DecodeAccount())
    values: dict[str, Any] = {"members": 4, "speedup_without_drafter": speedup, **changes}
    return _outlook(left, seconds, **values)


def _evaluate(
    evidence: PayoffEvidence, evaluation: DrafterEvaluation, micro_batches: int, step: Step
) -> PayoffEvidence:
    after = record_evaluation(evidence, evaluation, base_with(micro_batches), step)
    if gate.judge_evaluation(evaluation) is Judgement.ADOPT:
        return record_success(after, step)
    return record_failure(after, step)


def _evidence(evaluations: list[EvaluatedVersion]) -> PayoffEvidence:
    evidence = _NOTHING
    for each in evaluations:
        evaluation = _measured(each.accept_length_before, each.accept_length, 4)
        evidence = _evaluate(evidence, evaluation, each.micro_batches, Step(0))
    return msgspec.structs.replace(evidence, evaluated_step=Step(0))


def _named(steps: int) -> JobSpec:
    return small_spec(steps=steps, train="auto", drafter="/drafter")


# --- what pays ----------------------------------------------------------------------------------


def test_trains_and_reserves_time_at_a_cold_start_with_many_steps_left() -> None:
    spec = small_spec(steps=100, train="auto")
    ahead = _ahead(spec, 0)
    reserved = gate.judge_reserved_time(spec, _NOTHING, ahead)
    assert reserved.worth
    assert reserved.cost >= 8.0
    assert reserved.savings > 2.0 * reserved.cost
    assert gate.judge_idle_training(spec, _NOTHING, ahead).worth


def test_counts_only_gains_over_ngrams() -> None:
    """A drafter is worth nothing if n-grams are accepted as often."""
    spec, saved = small_spec(steps=30, train="auto"), list[float]()
    for faster in (1.0, 1.3, 1.6, 2.4):
        costs = decoded([with_ngrams(1000, 1.0 / faster), control_runs(20, 1000, 1.0)])
        speedup = speedup_model.without_drafter(spec, costs)
        ahead = _outlook(29, 6.0, speedup_without_drafter=speedup)
        saved.append(gate.judge_reserved_time(spec, _NOTHING, ahead).savings)
    assert saved == sorted(saved, reverse=True)
    assert saved[0] > 40.0
    assert saved[-1] == 0.0


def test_reserves_no_time_to_read_answers_too_often() -> None:
    spec = small_spec(steps=30, train="auto")

    def reserved(tokens: int, micro_batches: int) -> gate.Verdict:
        progress = TrainingProgress(
            answer_tokens=tokens,
            micro_batches=micro_batches,
            tokens_read=1024 * micro_batches,
            seconds=micro_batches / 10.0,
        )
        ahead = _outlook(
            29,
            6.0,
            micro_batches_per_second=progress.micro_batch_rate,
            learnable_micro_batches=progress.learnable_micro_batches,
        )
        return gate.judge_reserved_time(spec, _NOTHING, ahead)

    few, some, many = reserved(9_000, 0), reserved(45_000, 0), reserved(600_000, 0)
    assert few.worth
    # 17 micro-batches by two members
    assert few.cost == pytest.approx(17.6 / (2 * 10.0 * 0.85), rel=0.01)
    assert few.cost < some.cost < many.cost
    assert few.savings < some.savings < many.savings
    assert not reserved(45_000, 90).worth


def test_reserves_no_time_if_idle_seconds_suffice_soon() -> None:
    spec = small_spec(steps=30, train="auto")
    verdicts = [
        gate.judge_reserved_time(
            spec,
            _NOTHING,
            _outlook(29, 6.0, speedup_without_drafter=1.0, idle_micro_batches=idle),
        )
        for idle in (0.0, 2.0, 10.0, 200.0)
    ]
    gained = [verdict.savings - verdict.cost for verdict in verdicts]
    assert gained == sorted(gained, reverse=True)
    assert verdicts[0].worth
    assert gained[0] > 2.0 * gained[2]
    assert not verdicts[-1].worth


@given(steps=st.integers(0, 5000), idle=st.floats(0.0, 1000.0), most=st.floats(0.0, 1e5))
def test_predicts_no_larger_savings_than_all_rollout_time(
    steps: int, idle: float, most: float
) -> None:
    spec = small_spec(steps=30, train="auto")
    ahead = _outlook(steps, 6.0, learnable_micro_batches=most, idle_micro_batches=idle)
    verdict = gate.judge_reserved_time(spec, _NOTHING, ahead)
    assert 0.0 <= verdict.savings <= 6.0 * steps
    assert not verdict.worth or verdict.savings > 2.0 * verdict.cost


_ENDED = [_version(i, 1000 + 50 * i, 4.25, 4.25) for i in range(12)]


@pytest.mark.parametrize(("trained", "rests"), [(4.25, True), (4.45, False)])
def test_tries_new_answers_in_idle_seconds_where_the_curve_has_ended(
    trained: float, rests: bool
) -> None:
    spec = small_spec(steps=100, train="auto")
    evidence = msgspec.structs.replace(_evidence(_ENDED), failures=0, wait_until=Step(0))
    tried = [_tries(spec, evidence, Step(0), Step(0))]
    for step in map(Step, range(1, 6)):
        tried.append(_tries(spec, evidence, step, step))
        evaluation = _measured(4.25, trained, 4)
        evidence = _evaluate(evidence, evaluation, 1600 + 50 * step, step)
        # during an evaluation of the policy, the next step has no answers yet
        evaluating = _tries(spec, evidence, Step(step + 1), step)
        if rests:
            assert not evaluating
    assert tried == [False, True, True, True, True, not rests]


def _tries(spec: JobSpec, evidence: PayoffEvidence, step: Step, newest_step: Step) -> bool:
    ahead = _ahead(
        spec,
        step,
        seconds=20.0,
        members=2,
        micro_batches_per_second=1600 / 80.0,
        step=step,
        newest_step=newest_step,
    )
    assert not gate.judge_reserved_time(spec, evidence, ahead).worth
    return gate.judge_idle_training(spec, evidence, ahead).worth


def test_measures_a_named_drafter_before_reserving_time() -> None:
    """It may already be at its best, which idle seconds find out."""
    named = _named(steps=100)
    ahead = _ahead(named, 0)
    assert not gate.judge_reserved_time(named, _NOTHING, ahead).worth
    assert gate.judge_idle_training(named, _NOTHING, ahead).worth
    first = _version(1, 24, 2.0, 2.4)
    assert gate.judge_reserved_time(named, _evidence([first]), ahead).worth


def test_trains_a_named_drafter_once_it_has_become_worse_than_its_best() -> None:
    """Rollouts with chains of four reveal that without an evaluation."""
    named = _named(steps=10)
    ahead = _ahead(named, 0, seconds=5.0)
    initial = record_named_live(_NOTHING, [_chains_of_four(4.9)])
    assert initial.curve is not None
    assert initial.curve.now == pytest.approx(6.79, abs=0.01)
    assert not gate.judge_idle_training(named, initial, ahead).worth
    assert not gate.judge_reserved_time(named, initial, ahead).worth
    later = initial
    for _ in range(20):
        later = refit_named(record_named_live(later, [_chains_of_four(4.0)]))
    assert later.curve is not None
    assert later.curve.plateau >= 6.7
    assert later.curve.now == pytest.approx(5.04, abs=0.1)
    assert gate.judge_idle_training(named, later, ahead).worth
    # no evaluation has shown yet that training helps
    assert not gate.judge_reserved_time(named, later, _ahead(named, 0, seconds=50.0)).worth


def _chains_of_four(length: float) -> StrategyTally:
    return tally(round(5000 * length), 1.0, strategy=Draft(depth=4), rows=5000)


@given(evaluations=evaluated_versions, seconds=st.floats(0.0, 1e5), members=st.integers(1, 64))
@settings(max_examples=40)
def test_trains_nothing_at_the_last_step(
    evaluations: list[EvaluatedVersion], seconds: float, members: int
) -> None:
    spec = small_spec(steps=5, train="auto")
    ahead = _ahead(spec, 4, seconds, members=members)
    assert not gate.judge_reserved_time(spec, _evidence(evaluations), ahead).worth
    assert not gate.judge_idle_training(spec, _evidence(evaluations), ahead).worth


@given(length=st.floats(1.0, 6.0), steps=st.integers(2, 30), seconds=st.floats(0.1, 100.0))
@settings(max_examples=40)
def test_reserves_hardly_any_time_for_a_drafter_at_its_plateau(
    length: float, steps: int, seconds: float
) -> None:
    evaluations = [_version(0, 2000 + 24 * i, length, length) for i in range(1, 41)]
    spec = small_spec(steps=steps, train="auto")
    evidence = msgspec.structs.replace(_evidence(evaluations), wait_until=Step(0))
    verdict = gate.judge_reserved_time(spec, evidence, _ahead(spec, 0, seconds))
    assert verdict.savings <= 0.15 * seconds * steps
    assert verdict.cost <= 0.5 * verdict.savings


@given(evaluations=evaluated_versions, seconds=st.floats(-1e6, 1e6), members=st.integers(0, 64))
@settings(max_examples=40)
def test_obeys_always_and_off(
    evaluations: list[EvaluatedVersion], seconds: float, members: int
) -> None:
    evidence = _evidence(evaluations)
    for train, worth in (("always", True), ("off", False)):
        spec = small_spec(steps=9, train=train)  # pyright: ignore[reportArgumentType]
        ahead = _ahead(spec, 0, seconds, members=members)
        assert gate.judge_idle_training(spec, evidence, ahead).worth is worth
        assert not gate.judge_reserved_time(spec, evidence, ahead).worth


@given(evaluations=evaluated_versions, seconds=st.floats(-1e6, 1e6), members=st.integers(1, 64))
@settings(max_examples=40)
def test_verdicts_are_finite(
    evaluations: list[EvaluatedVersion], seconds: float, members: int
) -> None:
    spec, evidence = small_spec(steps=9, train="auto"), _evidence(evaluations)
    ahead = _ahead(spec, 0, seconds, members=members)
    for verdict in (
        gate.judge_idle_training(spec, evidence, ahead),
        gate.judge_reserved_time(spec, evidence, ahead),
    ):
        assert math.isfinite(verdict.savings)
        assert verdict.cost >= 0.0
        assert not verdict.worth or verdict.savings > verdict.cost


def test_rests_longer_after_each_failure_up_to_a_limit() -> None:
    spec = small_spec(steps=1000, train="auto")
    evidence, step, rests = _NOTHING, 0, list[int]()
    failure = _measured(3.0, 2.9, 4)
    for _ in range(100):
        evidence = _evaluate(evidence, failure, 24, Step(step))
        for pause in range(step, evidence.wait_until):
            ahead = _ahead(spec, pause, 1e6, step=Step(pause))
            assert not gate.judge_idle_training(spec, evidence, ahead).worth
            assert not gate.judge_reserved_time(spec, evidence, ahead).worth
        rests.append(evidence.wait_until - step)
        step = evidence.wait_until
    assert rests[:7] == [0, 0, 1, 2, 4, 8, 8]
    assert rests == sorted(rests)
    better = _measured(2.9, 3.2, 4)
    assert _evaluate(evidence, better, 24, Step(step)).failures == 0


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
    evaluation = _measured(used, trained, 4)
    assert gate.judge_evaluation(evaluation) is judgement
    without_answers = _measured(used, trained, 0)
    assert gate.judge_evaluation(without_answers) is Judgement.UNMEASURED


def test_reserves_little_before_a_rollout_has_shown_a_speedup() -> None:
    spec = small_spec(steps=30, train="auto")
    plan: dict[str, Any] = {"planned_seconds": 200.0, "speedup_without_drafter": 1.0}
    first = gate.judge_reserved_time(spec, _NOTHING, _outlook(29, 6.0, **plan))
    assert first.worth
    assert first.cost == pytest.approx(0.05 * 200.0)
    spent = _outlook(29, 6.0, reserved_seconds=10.0, **plan)
    assert not gate.judge_reserved_time(spec, _NOTHING, spent).worth
    shown = record_speedup(_NOTHING, predicted=0.5, measured=0.5, error=0.05)
    assert gate.judge_reserved_time(spec, shown, spent).cost > first.cost


def test_trains_no_further_where_rollouts_get_no_faster() -> None:
    """A shallow policy's step costs as little as the drafts that would save it."""
    spec = small_spec(steps=30, train="auto")
    ahead = _outlook(29, 6.0, planned_seconds=200.0, idle_micro_batches=10.0)
    evidence = _evidence([_version(1, 50, None, 1.6), _version(1, 100, 1.6, 2.2)])
    assert gate.judge_idle_training(spec, evidence, ahead).worth
    for _ in range(8):
        evidence = record_speedup(evidence, predicted=0.4, measured=-0.02, error=0.1)
    assert evidence.realised is not None
    assert evidence.realised < 0.05
    assert not gate.judge_idle_training(spec, evidence, ahead).worth
    assert not gate.judge_reserved_time(spec, evidence, ahead).worth


def test_uncertain_speedups_say_little() -> None:
    certain = record_speedup(_NOTHING, predicted=0.4, measured=0.0, error=0.01)
    vague = record_speedup(_NOTHING, predicted=0.4, measured=0.0, error=4.0)
    small = record_speedup(_NOTHING, predicted=0.1, measured=0.0, error=0.01)
    assert certain.realised == pytest.approx(0.5, abs=0.01)
    assert vague.realised == pytest.approx(1.0, abs=0.01)
    assert small.realised is None
