"""Adopt, reject and revert drafter versions, and free the blobs that no version needs any more."""

from collections.abc import Iterable

from tlt.base.id_types import Incarnation
from tlt.policies.drafter import (
    bases_and_deltas,
    training_evidence,
    used_and_fallback_drafters,
)
from tlt.policies.drafter.bases_and_deltas import Lineage
from tlt.policies.drafter.drafter_state import DrafterState
from tlt.policies.drafter.live_acceptance import LiveAcceptance, scale_to_current_policy
from tlt.policies.drafter.training_evidence import Judgement
from tlt.policies.drafter.used_and_fallback_drafters import Adoption
from tlt.policies.run import blob_retention
from tlt.policies.run.run_state import Duty, Turn
from tlt.protocol.commands import (
    AdoptDrafter,
    CommitDrafter,
    DrafterDecision,
    ExplainDrafterDecision,
    ReleaseBlobs,
)
from tlt.protocol.events import DrafterMerged
from tlt.protocol.refs import BlobRef, DrafterRef
from tlt.protocol.shared_values import DrafterEvaluation


def adopt_or_reject(turn: Turn, event: DrafterMerged) -> None:
    """Continue from the merged base, and adopt or reject the drafter in it."""
    merged, unused = bases_and_deltas.replace_base(
        turn.state.drafter.lineage, event.base, event.seconds
    )
    turn.set_drafter(lineage=merged)
    release(turn, unused)
    evaluation, used = event.evaluation, turn.state.drafter.adoption.used
    if used is not None and event.drafter.architecture != used.architecture:
        release(turn, (event.drafter.weights,))
        restart(turn, "the trained drafter has another shape than the one in use")
        return
    judgement = training_evidence.judge_evaluation(evaluation)
    if judgement is Judgement.UNMEASURED:
        release(turn, (event.drafter.weights,))
        return
    _record_evaluation(turn, event, judgement)
    before, after = evaluation.accept_length_before, evaluation.accept_length
    against = "none" if before is None else f"{before:.2f}"
    why = f"accept length {after:.2f} against {against} on {evaluation.answers} answers"
    if judgement is Judgement.ADOPT:
        explain(turn, "adopt", why)
        _adopt(turn, event.drafter, evaluation)
        return
    explain(turn, "reject", why)
    release(turn, (event.drafter.weights,))
    if judgement is Judgement.RESTART:
        restart(turn, "the trained drafter has become worse than the one in use")


def _record_evaluation(turn: Turn, event: DrafterMerged, judgement: Judgement) -> None:
    drafter, step = turn.state.drafter, turn.state.step
    evidence = training_evidence.record_evaluation(drafter.evidence, event.evaluation, event.base)
    if judgement is Judgement.ADOPT:
        turn.set_drafter(evidence=training_evidence.record_success(evidence, step))
    else:
        turn.set_drafter(evidence=training_evidence.record_failure(evidence, step))


def _adopt(turn: Turn, drafter: DrafterRef, evaluation: DrafterEvaluation) -> None:
    state, before = turn.state, turn.state.drafter.adoption
    turn.emit(CommitDrafter(job=state.job, drafter=drafter))
    live_now = _live_under_current_policy(state.drafter, evaluation)
    turn.set_drafter(adoption=used_and_fallback_drafters.adopt(before, drafter, live_now))
    if before.used is not None:
        release(turn, (before.used.weights,))
    blob_retention.discard_drafters(turn, before.previous, before.fallback)
    _send_adopted(turn)


def _live_under_current_policy(
    drafter: DrafterState, evaluation: DrafterEvaluation
) -> LiveAcceptance:
    """Scale the live acceptance of the drafter in use, some of it measured under earlier policies.

    It shrinks as much as the drafter's evaluated accept length has since its adoption.
    """
    live, used = drafter.adoption.live, drafter.adoption.version_in_use
    measured = [each.accept_length for each in drafter.evidence.evaluations if each.version == used]
    then = measured[-1] if measured else drafter.evidence.initial_length
    if then is None or evaluation.accept_length_before is None:
        return live
    return scale_to_current_policy(live, then, evaluation.accept_length_before)


def _send_adopted(turn: Turn) -> None:
    state = turn.state
    for worker in state.workers.values():
        if worker.duty is not Duty.RESTARTING:
            turn.emit(
                AdoptDrafter(
                    worker=worker.info.worker,
                    incarnation=worker.info.incarnation,
                    job=state.job,
                    drafter=state.drafter.adoption.used,
                )
            )


def revert(turn: Turn, drafter: DrafterRef | None, why: str) -> None:
    """Use an earlier drafter again, and restart training from it."""
    before = turn.state.drafter.adoption
    after = used_and_fallback_drafters.use_earlier(before, drafter)
    evidence = training_evidence.forget_later_versions(
        turn.state.drafter.evidence, after.version_in_use, turn.state.step
    )
    turn.set_drafter(adoption=after, evidence=evidence)
    _send_adopted(turn)
    if before.used is not None:
        release(turn, (before.used.weights,))
    restart(turn, why)
    blob_retention.discard_drafters(turn, before.used, before.previous, before.fallback)


def restart(turn: Turn, why: str) -> None:
    """Train from the drafter in use again; deltas against other weights become void."""
    restarted, unused = bases_and_deltas.begin_new_root(
        turn.state.drafter.lineage, turn.state.drafter.adoption.used
    )
    turn.set_drafter(lineage=restarted)
    release(turn, unused)
    explain(turn, "restart", why)


def cancel_merge(turn: Turn, incarnation: Incarnation) -> None:
    after, unused = bases_and_deltas.cancel_merge(turn.state.drafter.lineage, incarnation)
    turn.set_drafter(lineage=after)
    release(turn, unused)


def end(turn: Turn) -> None:
    """Free all blobs but the drafter in use; keep the figures that its exported card shows."""
    before = turn.state.drafter
    used = before.adoption.used
    unused = before.lineage.blobs if used is None else (*before.lineage.blobs, used.weights)
    turn.set(
        drafter=DrafterState(
            lineage=Lineage(newest_version=before.lineage.newest_version),
            adoption=Adoption(live=before.adoption.live),
            evidence=training_evidence.TrainingEvidence(evaluations=before.evidence.evaluations),
        )
    )
    release(turn, unused)  # `used` was committed to the run's folder
    turn.set_drafter(adoption=Adoption(used=used, live=before.adoption.live))
    blob_retention.discard_drafters(turn, before.adoption.previous, before.adoption.fallback)


def release(turn: Turn, blobs: Iterable[BlobRef]) -> None:
    """Free blobs in flight that nothing else names: equal bytes are one blob."""
    drafter = turn.state.drafter
    named = set(drafter.lineage.blobs)
    if drafter.adoption.used is not None:
        named.add(drafter.adoption.used.weights)
    unused = tuple(blob for blob in dict.fromkeys(blobs) if blob not in named)
    if unused:
        turn.emit(ReleaseBlobs(job=turn.state.job, blobs=unused))


def explain(turn: Turn, kind: DrafterDecision, why: str) -> None:
    turn.emit(ExplainDrafterDecision(job=turn.state.job, kind=kind, why=why))
