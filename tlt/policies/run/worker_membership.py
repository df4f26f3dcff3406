"""Let workers join and leave a run; a newer incarnation always ends the one before it."""

from collections.abc import Mapping

import msgspec

from tlt.base.id_types import Incarnation, WorkerId
from tlt.policies.run import (
    chosen_sizes,
    drafter_merges,
    drafter_training_scheduler,
    phase_transitions,
    policy_updates,
    rollout_batch_opening,
)
from tlt.policies.run.run_state import Duty, Phase, Turn, WorkerState
from tlt.protocol.commands import OpenJob, SuspendJob
from tlt.protocol.events import WorkerLost
from tlt.protocol.shared_values import WorkerInfo

# losses of workers before the last steps are forgotten
_REMEMBERED_STEPS = 10


def join(turn: Turn, info: WorkerInfo) -> None:
    """Let a worker join; if the run is paused, only note that its last incarnation is over."""
    if turn.state.phase is not Phase.PAUSED:
        add(turn, info)
        return
    known = turn.state.workers.get(info.worker)
    if known is not None and known.info.incarnation < info.incarnation:
        _drop(turn, known)
        suspend_if_free(turn)


def add(turn: Turn, info: WorkerInfo) -> None:
    state = turn.state
    if info.incarnation <= state.newest_incarnations.get(info.worker, -1):
        return
    known = state.workers.get(info.worker)
    if known is not None:
        _drop(turn, known)
        _count_loss(turn, known, f"{info.worker} started again")
        if turn.state.phase is Phase.ENDED:
            return
    elif info.worker in state.newest_incarnations:
        rollout_batch_opening.requeue(turn, state.newest_incarnations[info.worker])
    turn.put_worker(info.worker, WorkerState(info=info))
    turn.set(
        newest_incarnations={**state.newest_incarnations, info.worker: info.incarnation},
        returning_workers=turn.state.returning_workers - {info.worker},
    )
    turn.emit(
        OpenJob(
            worker=info.worker,
            incarnation=info.incarnation,
            job=state.job,
            epoch=state.epoch,
            spec=state.spec,
            folder=state.folder,
            sizing=chosen_sizes.facts_for(state, info),
        )
    )
    if turn.state.phase in rollout_batch_opening.ROLLOUT_PHASES:
        rollout_batch_opening.assign(turn, info.worker)
    else:
        phase_transitions.advance(turn)
    drafter_training_scheduler.stop_ineligible(turn)


def lose(turn: Turn, event: WorkerLost) -> None:
    state = turn.state
    newest = state.newest_incarnations.get(event.worker)
    if newest is not None and event.incarnation < newest:
        return
    turn.set(newest_incarnations={**state.newest_incarnations, event.worker: event.incarnation})
    known = state.workers.get(event.worker)
    if known is None:
        never_joined = newest != event.incarnation
        if never_joined and newest is not None:
            rollout_batch_opening.requeue(turn, newest)
        if never_joined or not event.returning:
            turn.set(returning_workers=turn.state.returning_workers - {event.worker})
            phase_transitions.advance(turn)
        return
    if known.duty is Duty.STOPPING and not event.with_session:
        drafter_training_scheduler.record_stop(turn, state.spec.drafter.stop_seconds)
    _drop(turn, known)
    if event.returning:
        turn.set(returning_workers=turn.state.returning_workers | {event.worker})
    if not event.with_session:
        _count_loss(turn, known, event.reason)
    phase_transitions.advance(turn)
    suspend_if_free(turn)


def forget(turn: Turn, worker: WorkerId) -> None:
    """Forget a lost worker that serves another job, or none, from now on."""
    state = turn.state
    newest = state.newest_incarnations.get(worker)
    if newest is None or worker in state.workers:
        return
    turn.set(
        newest_incarnations=_without(state.newest_incarnations, worker),
        returning_workers=state.returning_workers - {worker},
    )
    rollout_batch_opening.requeue(turn, newest)
    phase_transitions.advance(turn)


def note_incarnations(turn: Turn, newest: Mapping[WorkerId, Incarnation]) -> None:
    """Note incarnations that ended while the run was paused, so that they don't join it late.

    A run that has workers of its own forgets those that have served others meanwhile.
    """
    known = turn.state.newest_incarnations
    for worker, incarnation in newest.items():
        if incarnation > known.get(worker, -1):
            if worker in known:
                rollout_batch_opening.requeue(turn, known[worker])
            if turn.state.spec.workers.asked is None:
                known = {**known, worker: incarnation}
            else:
                known = _without(known, worker)
    turn.set(newest_incarnations=known)


def _without(
    incarnations: Mapping[WorkerId, Incarnation], worker: WorkerId
) -> dict[WorkerId, Incarnation]:
    return {known: newest for known, newest in incarnations.items() if known != worker}


def suspend_if_free(turn: Turn) -> None:
    """Report that a paused run has no workers any more."""
    if turn.state.phase is Phase.PAUSED and not turn.state.workers:
        turn.emit(SuspendJob(job=turn.state.job))


def _count_loss(turn: Turn, lost: WorkerState, reason: str) -> None:
    """Fail the job past its limit of losses; replaced ranks don't count as a loss."""
    if lost.duty is Duty.RESTARTING:
        return
    step, limit = turn.state.step, turn.state.spec.workers.max_restarts
    known = turn.state.membership
    losses = (*known.loss_steps, step)
    turn.set(membership=msgspec.structs.replace(known, loss_steps=losses))
    recent = sum(each > step - _REMEMBERED_STEPS for each in losses)
    if recent > limit:
        complaint = (
            f"worker {lost.info.worker} was lost, loss number {recent} within "
            f"{_REMEMBERED_STEPS} steps (workers.max_restarts is {limit}): {reason}"
        )
        phase_transitions.end_job(turn, "failed", complaint)


def _drop(turn: Turn, lost: WorkerState) -> None:
    """Forget an incarnation, and requeue the prompts that it held."""
    worker, phase = lost.info.worker, turn.state.phase
    turn.put_worker(worker, None)
    drafter_merges.lose_members(turn, lost)
    rollout_batch_opening.requeue(turn, lost.info.incarnation)
    if phase is Phase.POLICY_UPDATE and lost.duty is Duty.POLICY_UPDATE:
        policy_updates.abandon_update(turn, f"{worker} was lost during the update")
