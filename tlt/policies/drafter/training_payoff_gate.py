"""Decide whether drafter training pays: predicted seconds saved against seconds spent.

Training saves rollout time in the remaining steps, by as much as the learning curve predicts. Idle
seconds cost the decoding that they slow down; reserved seconds cost their own length.
"""

import math
from collections.abc import Sequence
from enum import Enum, auto

import msgspec

from tlt.base.id_types import Step
from tlt.policies.drafter import speedup_model
from tlt.policies.drafter.learning_curve import LearningCurve, fit_curve, lift_plateau
from tlt.policies.drafter.payoff_evidence import PayoffEvidence
from tlt.protocol.shared_values import DrafterEvaluation
from tlt.spec.config import JobSpec

# share of a second of decoding lost beside a worker that trains: both share a cache or power limit
_SLOWED = 0.1
# micro-batches of a step's idle time, before any was measured
_USUAL_IDLE = 8.0
# share of a single member's gain that a micro-batch has where several members train
_MERGED = 0.85
# reserved time must be predicted to save this many times its cost
_MARGIN = 2.0
# share of the rollouts' time that may be reserved before a rollout has shown that drafters pay
_UNPROVEN_SHARE = 0.05
# share of the predicted speedup that proves it
_PROOF = 0.75
_RESERVATIONS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
# steps to come at which the gain is evaluated
_SAMPLED_STEPS = 5
# shares of the accept length in use
_BETTER = 1.01
_MUCH_WORSE = 0.9
# accept length of a drafter that the spec names, before it is measured
_NAMED = 3.0
_UNMEASURED = {False: fit_curve(None, ()), True: fit_curve(_NAMED, ())}


class TrainingOutlook(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the job to come that a better drafter can shorten."""

    step: Step
    # the last step that has answers to train on
    newest_step: Step
    # rollout batches still to be opened, and the seconds that each takes at the present speed
    steps: int
    rollout_seconds: float
    members: int
    # rate of one member
    micro_batches_per_second: float
    # speed of rollouts without a drafter against plain decoding
    speedup_without_drafter: float
    # micro-batches until more readings of the answers would teach little
    learnable_micro_batches: float = math.inf
    # micro-batches since the last evaluation
    unmerged_micro_batches: float = 0.0
    # micro-batches of idle time in each step
    idle_micro_batches: float = 0.0
    # seconds that were reserved so far, and those of all rollouts of the job at the present speed
    reserved_seconds: float = 0.0
    planned_seconds: float = math.inf


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    worth: bool
    # predicted seconds of the job
    savings: float = 0.0
    cost: float = 0.0
    why: str


class Judgement(Enum):
    """The outcome of a drafter's evaluation."""

    UNMEASURED = auto()
    ADOPT = auto()
    REJECT = auto()
    # rejected and much worse, so that training restarts from the drafter in use
    RESTART = auto()


def judge_evaluation(evaluation: DrafterEvaluation) -> Judgement:
    used, trained = evaluation.accept_length_before, evaluation.accept_length
    if evaluation.answers <= 0 or not math.isfinite(trained):
        return Judgement.UNMEASURED
    if trained > _BETTER * (used or 1.0):
        return Judgement.ADOPT
    much_worse = used is not None and trained < _MUCH_WORSE * used
    return Judgement.RESTART if much_worse else Judgement.REJECT


def judge_idle_training(
    spec: JobSpec, evidence: PayoffEvidence, outlook: TrainingOutlook
) -> Verdict:
    """Choose the stretch of idle training that pays best."""
    if spec.drafter.train != "auto":
        return Verdict(worth=spec.drafter.train == "always", why=f"train: {spec.drafter.train}")
    if outlook.step < evidence.wait_until:
        return _waiting(evidence)
    curve = _hopeful_curve(spec, evidence, outlook)
    idle = outlook.idle_micro_batches or _USUAL_IDLE
    # a drafter is used only once its micro-batches are merged and evaluated
    every, unmerged = spec.drafter.merge_every, outlook.unmerged_micro_batches
    trained = (unmerged + idle * (step + 1.0) for step in _sampled_steps(outlook))
    stretches = [(0.0, every * math.floor(count / every)) for count in trained]
    saved = _saved(curve, stretches, evidence, outlook)
    cost = _SLOWED * idle * outlook.steps / outlook.micro_batches_per_second
    next_length = curve.after(spec.drafter.merge_every)
    why = f"accept length {curve.now:.2f} now, {next_length:.2f} expected at the next evaluation"
    return Verdict(worth=saved > cost, savings=saved, cost=cost, why=why)


def judge_reserved_time(
    spec: JobSpec, evidence: PayoffEvidence, outlook: TrainingOutlook
) -> Verdict:
    """Choose the number of seconds of all workers that pays best, as the verdict's `cost`."""
    best = Verdict(worth=False, why="nothing pays")
    if spec.drafter.train != "auto":
        return best
    if outlook.step < evidence.wait_until:
        return _waiting(evidence)
    if spec.drafter.path is not None and not evidence.evaluations:
        return Verdict(worth=False, why="the named drafter was not measured yet")
    curve = _curve(spec, evidence)
    rate = outlook.members * outlook.micro_batches_per_second
    rate *= _MERGED if outlook.members > 1 else 1.0
    most = outlook.learnable_micro_batches / rate
    if evidence.realised is None or evidence.realised < _PROOF:
        most = min(most, _UNPROVEN_SHARE * outlook.planned_seconds - outlook.reserved_seconds)
    if most <= 0.0:
        return best
    for seconds in {min(seconds, most): None for seconds in _RESERVATIONS}:
        micro_batches = seconds * rate
        saved = _saved_beside_idle_training(curve, micro_batches, evidence, outlook)
        if saved > _MARGIN * seconds and saved - seconds > best.savings - best.cost:
            after = curve.after(micro_batches)
            why = f"accept length {curve.now:.2f} now, {after:.2f} expected"
            best = Verdict(worth=True, savings=saved, cost=seconds, why=why)
    return best


def _waiting(evidence: PayoffEvidence) -> Verdict:
    return Verdict(worth=False, why=f"waits until step {evidence.wait_until}")


def _curve(spec: JobSpec, evidence: PayoffEvidence) -> LearningCurve:
    return evidence.curve or _UNMEASURED[spec.drafter.path is not None]


def _hopeful_curve(
    spec: JobSpec, evidence: PayoffEvidence, outlook: TrainingOutlook
) -> LearningCurve:
    """Assume that new answers lift a curve that has ended, because idle seconds cost little."""
    curve = _curve(spec, evidence)
    new_answers = evidence.evaluations and outlook.newest_step > evidence.evaluated_step
    return lift_plateau(curve) if new_answers else curve


def _saved_beside_idle_training(
    curve: LearningCurve, micro_batches: float, evidence: PayoffEvidence, outlook: TrainingOutlook
) -> float:
    """Count the gain of reserved time only until idle seconds would have taught the same."""
    before = [outlook.idle_micro_batches * (step + 0.5) for step in _sampled_steps(outlook)]
    stretches = [(count, count + micro_batches) for count in before]
    return _saved(curve, stretches, evidence, outlook)


def _sampled_steps(outlook: TrainingOutlook) -> list[float]:
    """Return some of the steps to come, each of which stands for as many."""
    count = min(outlook.steps, _SAMPLED_STEPS)
    return [outlook.steps * (index + 0.5) / count - 0.5 for index in range(count)]


def _saved(
    curve: LearningCurve,
    sampled: Sequence[tuple[float, float]],
    evidence: PayoffEvidence,
    outlook: TrainingOutlook,
) -> float:
    """Return the rollout seconds saved in all steps to come.

    `sampled` has the micro-batches at some steps, without the training in question and with it.
    """
    if not sampled:
        return 0.0
    without_drafter = outlook.speedup_without_drafter
    realised = 1.0 if evidence.realised is None else evidence.realised
    now, *_ = speeds = [
        speedup_model.with_drafter(curve.after(count), without_drafter, realised)
        for count in (0.0, *(count for pair in sampled for count in pair))
    ]
    saved = sum(
        now / without - now / with_it
        for without, with_it in zip(speeds[1::2], speeds[2::2], strict=True)
    )
    return outlook.rollout_seconds * saved * outlook.steps / len(sampled)
