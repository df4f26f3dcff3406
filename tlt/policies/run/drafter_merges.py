"""Request merges of the members' deltas from one of the members.

A merge is due after a number of micro-batches of all members together (`drafter.merge_every`) or,
by default, after enough seconds of training for what the last merge cost. Before one was measured,
the first delta is merged.
"""

from tlt.base.id_types import WorkerId
from tlt.policies.drafter import bases_and_deltas, training_evidence
from tlt.policies.drafter.bases_and_deltas import Merge
from tlt.policies.run import adopt_reject_revert, drafter_training_scheduler
from tlt.policies.run.run_state import (
    Duty,
    RunState,
    Turn,
    WorkerState,
    count_engines,
    current_worker,
)
from tlt.protocol.commands import MergeDrafter
from tlt.protocol.events import DrafterDeltaReady

# deltas that each rank of a merging member may hand in before the member is stopped
_DELTAS_INSTEAD_OF_MERGE = 16


def is_merging(state: RunState, worker: WorkerId) -> bool:
    merge = state.drafter.lineage.merge
    return merge is not None and merge.worker == worker


def lose_members(turn: Turn, worker: WorkerState) -> None:
    """Forget the ranks of a lost worker, but keep the deltas that they handed in."""
    adopt_reject_revert.cancel_merge(turn, worker.info.incarnation)
    known = turn.state.drafter.lineage
    if not worker.members.isdisjoint(known.newest_delta):
        turn.set_drafter(lineage=bases_and_deltas.remove_members(known, worker.members))


def record_delta(turn: Turn, event: DrafterDeltaReady) -> None:
    state, delta = turn.state, event.delta
    worker = current_worker(state, delta.worker, delta.incarnation)
    if worker is None:
        return
    if not bases_and_deltas.is_new(state.drafter.lineage, delta):
        adopt_reject_revert.release(turn, (delta.blob,))
        return
    seconds = event.seconds + event.reading_seconds + event.publishing_seconds
    after, unused = bases_and_deltas.add_delta(state.drafter.lineage, delta, seconds)
    turn.set_drafter(lineage=after)
    adopt_reject_revert.release(turn, unused)
    if worker.duty is Duty.DRAFTER_TRAINING:
        _merge_if_due(turn, worker)


def _merge_if_due(turn: Turn, worker: WorkerState) -> None:
    merge = turn.state.drafter.lineage.merge
    if merge is not None:
        _await_merge(turn, merge, worker)
    elif _is_due(turn.state):
        _request(turn, worker)


def _await_merge(turn: Turn, merge: Merge, worker: WorkerState) -> None:
    """Stop a member that keeps handing in deltas instead of merging."""
    if worker.info.incarnation != merge.incarnation:
        return
    after = bases_and_deltas.count_delta_since(turn.state.drafter.lineage, merge)
    turn.set_drafter(lineage=after)
    members = count_engines(turn.state, [worker])
    if merge.deltas_since + 1 >= _DELTAS_INSTEAD_OF_MERGE * members:
        drafter_training_scheduler.stop(turn, merge.worker)


def request_if_due(turn: Turn, worker: WorkerState) -> None:
    """Request a merge of a worker that has just begun to train, unless a member makes one."""
    state = turn.state
    if state.drafter.lineage.merge is None and _is_due(state) and _can_merge(state, worker):
        _request(turn, worker)


def _is_due(state: RunState) -> bool:
    lineage, every = state.drafter.lineage, state.spec.drafter.merge_every
    if every != "auto":
        return lineage.unmerged_micro_batches >= every
    least = training_evidence.seconds_between_merges(state.drafter.evidence, lineage.merge_seconds)
    return bool(lineage.deltas) and lineage.unmerged_seconds >= least


def _can_merge(state: RunState, worker: WorkerState) -> bool:
    """Return True if the worker holds weights to merge into: a base or its own initial weights."""
    known = state.drafter.lineage
    return known.base.weights is not None or not worker.members.isdisjoint(known.newest_delta)


def _request(turn: Turn, worker: WorkerState) -> None:
    state = turn.state
    after, merge = bases_and_deltas.start_merge(state.drafter.lineage, worker.info)
    turn.set_drafter(lineage=after)
    turn.emit(
        MergeDrafter(
            worker=merge.worker,
            incarnation=merge.incarnation,
            job=state.job,
            step=state.step,
            training_session=worker.training_session,
            version=merge.version,
            base=after.base,
            deltas=merge.deltas,
        )
    )
