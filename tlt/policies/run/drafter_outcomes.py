"""Act on the outcome of drafter training: merged, diverged, lost, refused, or worse."""

from collections.abc import Sequence

from tlt.base.id_types import NAMED
from tlt.policies.drafter import (
    bases_and_deltas,
    training_evidence,
    used_and_fallback_drafters,
)
from tlt.policies.drafter.live_acceptance import find_regression
from tlt.policies.run import adopt_reject_revert, drafter_training_scheduler
from tlt.policies.run.drafter_training_scheduler import is_wanted, judge_idle_training
from tlt.policies.run.run_state import Duty, Turn, current_worker
from tlt.protocol.events import DrafterCommitFailed, DrafterDiverged, DrafterMerged, DrafterRefused
from tlt.protocol.refs import DrafterRef
from tlt.protocol.shared_values import StrategyTally


def finish_merge(turn: Turn, event: DrafterMerged) -> None:
    worker = current_worker(turn.state, event.worker, event.incarnation)
    if worker is None:
        return
    if not drafter_training_scheduler.is_eligible(turn.state, worker):
        # the worker evaluated against another drafter than the one in use
        adopt_reject_revert.cancel_merge(turn, event.incarnation)
    if not bases_and_deltas.is_awaited(turn.state.drafter.lineage, event):
        late = (event.base.weights, event.drafter.weights)
        adopt_reject_revert.release(turn, (blob for blob in late if blob is not None))
        return
    adopt_reject_revert.adopt_or_reject(turn, event)
    _continue_or_stop(turn)


def _continue_or_stop(turn: Turn) -> None:
    """Send the merged base to all members, or stop them if training doesn't pay any longer."""
    state, verdict = turn.state, judge_idle_training(turn)
    members = [w for w in state.workers.values() if w.duty is Duty.DRAFTER_TRAINING]
    if not verdict.worth and members:
        adopt_reject_revert.explain(turn, "wait", verdict.why)
    for worker in members:
        if verdict.worth and state.speculation_allowed:
            drafter_training_scheduler.redirect(turn, worker)
        else:
            drafter_training_scheduler.stop(turn, worker.info.worker)


def restart_diverged(turn: Turn, event: DrafterDiverged) -> None:
    """Restart from the drafter in use, unless the base that diverged was replaced by now."""
    worker = current_worker(turn.state, event.worker, event.incarnation)
    if worker is None or not drafter_training_scheduler.is_open(worker, event.training_session):
        return
    drafter = turn.state.drafter
    if event.base != drafter.lineage.base.version:
        return
    turn.set_drafter(evidence=training_evidence.record_failure(drafter.evidence, turn.state.step))
    adopt_reject_revert.restart(turn, event.error)
    drafter_training_scheduler.stop_all(turn)


def restart_lost(turn: Turn) -> None:
    """Restart after blobs in flight were lost; the drafter in use was committed."""
    drafter = turn.state.drafter
    restarted, _ = bases_and_deltas.begin_new_root(drafter.lineage, drafter.adoption.used)
    turn.set_drafter(lineage=restarted)
    drafter_training_scheduler.redirect_all(turn)


# --- the drafter in use -------------------------------------------------------------------------


def record_live_acceptance(turn: Turn, tallies: Sequence[StrategyTally]) -> None:
    """Return to the earlier drafter if rollouts show that the one in use is much worse."""
    if not is_wanted(turn.state):
        return
    live = used_and_fallback_drafters.record_live(turn.state.drafter.adoption, tallies)
    turn.set_drafter(adoption=live)
    if live.used is None:
        return
    regression = find_regression(live.live, live.fallback_live)
    if regression is not None:
        now, before = regression
        why = f"accept length {now:.2f} in rollouts, {before:.2f} with the one before"
        _revert(turn, live.fallback, why)


def record_failed_commit(turn: Turn, event: DrafterCommitFailed) -> None:
    """Return to the previous drafter if the one in use isn't in the run's folder."""
    known = used_and_fallback_drafters.forget_uncommitted(
        turn.state.drafter.adoption, event.version
    )
    turn.set_drafter(adoption=known)
    if known.used is not None and known.used.version == event.version:
        why = f"version {event.version} could not be kept: {event.error}"
        _revert(turn, known.previous, why)
        _rest(turn)


def record_refusal(turn: Turn, event: DrafterRefused) -> None:
    """Return to the previous drafter if no worker can load the one in use."""
    state, known, version = turn.state, turn.state.drafter.adoption, event.version
    if current_worker(state, event.worker, event.incarnation) is None:
        return
    if version in (NAMED, known.version_in_use):
        known = used_and_fallback_drafters.add_refusal(known, version, event.incarnation)
        turn.set_drafter(adoption=known)
    incarnations = [worker.info.incarnation for worker in state.workers.values()]
    in_use = known.used is not None and version == known.used.version
    if in_use and used_and_fallback_drafters.is_refused_by_all(known, incarnations):
        _revert(turn, known.previous, event.error)
        _rest(turn)
    else:
        drafter_training_scheduler.stop_ineligible(turn)


def _revert(turn: Turn, drafter: DrafterRef | None, why: str) -> None:
    adopt_reject_revert.revert(turn, drafter, why)
    drafter_training_scheduler.redirect_all(turn)


def _rest(turn: Turn) -> None:
    evidence = training_evidence.rest_longest(turn.state.drafter.evidence, turn.state.step)
    turn.set_drafter(evidence=evidence)
