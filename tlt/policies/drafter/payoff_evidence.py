"""Evidence from evaluations and rollouts about how good the drafter is and may become."""

from collections.abc import Sequence

import msgspec

from tlt.base.id_types import NAMED, DrafterVersion, Step
from tlt.policies.drafter.learning_curve import (
    MOST_EVALUATIONS,
    EvaluatedVersion,
    LearningCurve,
    fit_curve,
)
from tlt.policies.drafter.live_acceptance import (
    LiveAcceptance,
    add_recent_tallies,
    estimate_accept_length,
)
from tlt.protocol.refs import DrafterBase
from tlt.protocol.shared_values import DrafterEvaluation, StrategyTally

# proposed tokens in a row when drafters are evaluated
EVALUATION_DEPTH = 6
# failures in a row before training pauses, each time for twice as many steps
_FAILURES_BEFORE_WAIT = 2
_LONGEST_WAIT = 8
# predicted gains in speed below this say nothing about those of better drafters
_LEAST_SPEEDUP = 0.4


class PayoffEvidence(msgspec.Struct, frozen=True, kw_only=True):
    # the newest evaluations, oldest first
    evaluations: tuple[EvaluatedVersion, ...] = ()
    # accept length before any training in this job
    initial_length: float | None = None
    # fitted to the evaluations, or to rollouts with the drafter that the spec names
    curve: LearningCurve | None = None
    # live acceptance of the drafter that the spec names, until there is an evaluation
    named_live: LiveAcceptance = {}
    # speed of rollouts against plain decoding before any drafter was adopted
    speedup_without_drafter: float | None = None
    # the newest step with answers at the last evaluation
    evaluated_step: Step = Step(0)
    # share of the predicted speedup that rollouts have shown; None before one was measured
    realised: float | None = None
    # failures in a row to gain anything by training, and the next step that may try again
    failures: int = 0
    wait_until: Step = Step(0)
    # the last decision about idle training, and why it was taken
    explained: str | None = None


def record_evaluation(
    evidence: PayoffEvidence,
    evaluation: DrafterEvaluation,
    base: DrafterBase,
    newest_step: Step,
) -> PayoffEvidence:
    evaluated = EvaluatedVersion(
        version=base.version,
        micro_batches=base.micro_batches,
        accept_length_before=evaluation.accept_length_before,
        accept_length=evaluation.accept_length,
    )
    initial = evidence.initial_length if evidence.evaluations else evaluation.accept_length_before
    evaluations = (*evidence.evaluations, evaluated)[-MOST_EVALUATIONS:]
    return msgspec.structs.replace(
        evidence,
        evaluations=evaluations,
        initial_length=initial,
        curve=fit_curve(initial, evaluations),
        evaluated_step=newest_step,
    )


def record_speedup(
    evidence: PayoffEvidence, predicted: float, measured: float, error: float
) -> PayoffEvidence:
    """Move the realised share by up to half of the way to the one seen, as far as it is certain."""
    if predicted < _LEAST_SPEEDUP:
        return evidence
    before = 1.0 if evidence.realised is None else evidence.realised
    weight = 0.5 * predicted**2 / (predicted**2 + error**2)
    realised = (1.0 - weight) * before + weight * min(1.0, max(0.0, measured / predicted))
    return msgspec.structs.replace(evidence, realised=realised)


def record_named_live(evidence: PayoffEvidence, tallies: Sequence[StrategyTally]) -> PayoffEvidence:
    """Add rollouts with the drafter that the spec names, until that is evaluated."""
    if evidence.evaluations:
        return evidence
    recent = add_recent_tallies(evidence.named_live, tallies, NAMED)
    after = msgspec.structs.replace(evidence, named_live=recent)
    return refit_named(after) if after.curve is None else after


def refit_named(evidence: PayoffEvidence) -> PayoffEvidence:
    """Expect training to restore the named drafter's best accept length so far."""
    if evidence.evaluations:
        return evidence
    length = estimate_accept_length(evidence.named_live, EVALUATION_DEPTH)
    if length is None:
        return evidence
    best = max(length, evidence.initial_length or 1.0)
    curve = fit_curve(best, ())
    now = min(length, curve.plateau)
    return msgspec.structs.replace(
        evidence, initial_length=best, curve=msgspec.structs.replace(curve, now=now)
    )


def record_success(evidence: PayoffEvidence, step: Step) -> PayoffEvidence:
    return msgspec.structs.replace(evidence, failures=0, wait_until=step)


def record_failure(evidence: PayoffEvidence, step: Step) -> PayoffEvidence:
    """Double the pause before the next try with each further failure in a row."""
    failures = evidence.failures + 1
    beyond = failures - _FAILURES_BEFORE_WAIT - 1
    pause = 0 if beyond < 0 else min(_LONGEST_WAIT, 2 ** min(beyond, _LONGEST_WAIT))
    return msgspec.structs.replace(evidence, failures=failures, wait_until=Step(step + pause))


def forget_later_versions(
    evidence: PayoffEvidence, version: DrafterVersion, step: Step
) -> PayoffEvidence:
    """Record the failure that led back to this version, and drop evaluations of later ones."""
    evaluations = tuple(each for each in evidence.evaluations if each.version <= version)
    initial = evidence.initial_length if evaluations else None
    curve = fit_curve(initial, evaluations) if evaluations else None
    kept = msgspec.structs.replace(
        evidence, evaluations=evaluations, initial_length=initial, curve=curve
    )
    return record_failure(kept, step)


def wait_longest(evidence: PayoffEvidence, step: Step) -> PayoffEvidence:
    """Pause training as long as possible, because no drafter can be loaded or committed."""
    return msgspec.structs.replace(evidence, wait_until=Step(step + _LONGEST_WAIT))
