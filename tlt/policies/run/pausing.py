"""Pause a run, and let it go on.

A paused run gives back its workers by replacing their ranks, as after a failed update: each worker
sends what it still has to report, and then its loss. The run stays open for answers that are
scored later. Unfinished answers of a step are cut first, so that they go on from their tokens when
the run does, under the same weights. Those of an evaluation, and an unpublished update, start over.
"""

from tlt.policies.run import phase_transitions, policy_updates, worker_membership
from tlt.policies.run.run_state import Duty, Phase, Turn
from tlt.protocol.commands import ContinueJob, ReplaceRanks

_REASON = "the job is paused"


def pause(turn: Turn) -> None:
    if turn.state.phase in (Phase.STARTING, Phase.PAUSED):
        return
    if turn.state.phase is Phase.POLICY_UPDATE:
        policy_updates.abandon_update(turn, _REASON)
    # nothing goes on with an answer of a group that may be put off
    cuts = turn.state.phase is Phase.ROLLOUT and not turn.state.spec.rollout.defer_long
    turn.enter(Phase.PAUSED)
    for worker, known in turn.state.workers.items():
        incarnation = known.info.incarnation
        if cuts and known.duty is Duty.ROLLOUT:
            turn.cut(known)
        if known.duty is not Duty.RESTARTING:
            turn.assign(worker, Duty.RESTARTING)
            turn.emit(ReplaceRanks(worker=worker, incarnation=incarnation, reason=_REASON))
    worker_membership.suspend_if_free(turn)


def resume(turn: Turn, event: ContinueJob) -> None:
    """Continue with the update phase, which goes on to the open batch if no update is due."""
    if turn.state.phase is not Phase.PAUSED:
        return
    turn.set(returning_workers=frozenset())
    for info in event.workers:
        worker_membership.add(turn, info)
    worker_membership.note_incarnations(turn, event.newest_incarnations)
    turn.enter(Phase.POLICY_UPDATE)
    phase_transitions.advance(turn)
