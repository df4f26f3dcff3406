"""Decide by a drafter's evaluations if the new version is used, and if training goes on.

Idle workers train as long as evaluations get better. After three in a row that didn't, or that the
end of the idle time has cut, training rests for a step, then two, four and eight, and tries again
each time. A young drafter may gain nothing yet: after each evaluation without a gain it trains
twice as long before the next.
"""

import math
from enum import Enum, auto

import msgspec

from tlt.base.id_types import DrafterVersion, Step
from tlt.protocol.refs import DrafterBase
from tlt.protocol.shared_values import DrafterEvaluation
from tlt.spec.config import JobSpec

# proposed tokens in a row when drafters are evaluated
EVALUATION_DEPTH = 6
# evaluations that are remembered
MOST_EVALUATIONS = 40
# failures in a row before training rests, each time for twice as many steps
_FAILURES_BEFORE_REST = 2
_LONGEST_REST = 8
# seconds of training for each second of merging, which so takes a fifth of the idle time at most
_TRAINING_PER_MERGE = 4
# doublings of that by evaluations without a gain, limited because the policy goes on changing
_MOST_DOUBLINGS = 3
# shares of the accept length in use
_BETTER = 1.01
_MUCH_WORSE = 0.9


class EvaluatedVersion(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The accept lengths of the drafter in use and of the trained one."""

    version: DrafterVersion
    micro_batches: int
    accept_length_before: float | None
    accept_length: float


class TrainingEvidence(msgspec.Struct, frozen=True, kw_only=True):
    # the newest evaluations, oldest first
    evaluations: tuple[EvaluatedVersion, ...] = ()
    # accept length before any training in this job
    initial_length: float | None = None
    # failures in a row to gain anything by training, and the next step that may try again
    failures: int = 0
    rests_until: Step = Step(0)
    # the last decision about idle training, and why it was taken
    explained: str | None = None


class Judgement(Enum):
    """The outcome of a drafter's evaluation."""

    UNMEASURED = auto()
    ADOPT = auto()
    REJECT = auto()
    # rejected and much worse, so that training restarts from the drafter in use
    RESTART = auto()


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    worth: bool
    why: str


def judge_evaluation(evaluation: DrafterEvaluation) -> Judgement:
    used, trained = evaluation.accept_length_before, evaluation.accept_length
    if evaluation.answers <= 0 or not math.isfinite(trained):
        return Judgement.UNMEASURED
    if trained > _BETTER * (used or 1.0):
        return Judgement.ADOPT
    much_worse = used is not None and trained < _MUCH_WORSE * used
    return Judgement.RESTART if much_worse else Judgement.REJECT


def judge_idle_training(
    spec: JobSpec, evidence: TrainingEvidence, step: Step, batches_to_come: int
) -> Verdict:
    """Say if idle workers train; what they learn serves the batches that are still to be opened."""
    if spec.drafter.train != "auto":
        return Verdict(worth=spec.drafter.train == "always", why=f"train: {spec.drafter.train}")
    if batches_to_come <= 0:
        return Verdict(worth=False, why="no rollouts are to come")
    if step < evidence.rests_until:
        why = f"{evidence.failures} evaluations in a row gained nothing; it rests until step"
        return Verdict(worth=False, why=f"{why} {evidence.rests_until}")
    return Verdict(worth=True, why=_describe_progress(evidence))


def improves(evidence: TrainingEvidence) -> bool:
    """Return True if one of the last evaluations gained something."""
    return bool(evidence.evaluations) and evidence.failures <= _FAILURES_BEFORE_REST


def seconds_between_merges(evidence: TrainingEvidence, merge_seconds: float) -> float:
    """Return how long all members train together before a merge like the last one is worth it."""
    doublings = min(evidence.failures, _MOST_DOUBLINGS)
    return _TRAINING_PER_MERGE * 2**doublings * merge_seconds


def _describe_progress(evidence: TrainingEvidence) -> str:
    if not evidence.evaluations:
        return "no version was evaluated yet"
    last = evidence.evaluations[-1].accept_length
    failed = f", {evidence.failures} without a gain" if evidence.failures else ""
    return f"accept length {last:.2f} after {len(evidence.evaluations)} evaluations{failed}"


def record_evaluation(
    evidence: TrainingEvidence, evaluation: DrafterEvaluation, base: DrafterBase
) -> TrainingEvidence:
    evaluated = EvaluatedVersion(
        version=base.version,
        micro_batches=base.micro_batches,
        accept_length_before=evaluation.accept_length_before,
        accept_length=evaluation.accept_length,
    )
    initial = evidence.initial_length if evidence.evaluations else evaluation.accept_length_before
    return msgspec.structs.replace(
        evidence,
        evaluations=(*evidence.evaluations, evaluated)[-MOST_EVALUATIONS:],
        initial_length=initial,
    )


def record_success(evidence: TrainingEvidence, step: Step) -> TrainingEvidence:
    return msgspec.structs.replace(evidence, failures=0, rests_until=step)


def record_failure(evidence: TrainingEvidence, step: Step) -> TrainingEvidence:
    """Double the rest before the next try with each further failure in a row."""
    failures = evidence.failures + 1
    beyond = failures - _FAILURES_BEFORE_REST - 1
    rest = 0 if beyond < 0 else min(_LONGEST_REST, 2 ** min(beyond, _LONGEST_REST))
    return msgspec.structs.replace(evidence, failures=failures, rests_until=Step(step + rest))


def forget_later_versions(
    evidence: TrainingEvidence, version: DrafterVersion, step: Step
) -> TrainingEvidence:
    """Record the failure that led back to this version, and drop evaluations of later ones."""
    evaluations = tuple(each for each in evidence.evaluations if each.version <= version)
    initial = evidence.initial_length if evaluations else None
    kept = msgspec.structs.replace(evidence, evaluations=evaluations, initial_length=initial)
    return record_failure(kept, step)


def rest_longest(evidence: TrainingEvidence, step: Step) -> TrainingEvidence:
    """Rest as long as possible, because no drafter can be loaded or committed."""
    return msgspec.structs.replace(evidence, rests_until=Step(step + _LONGEST_REST))
