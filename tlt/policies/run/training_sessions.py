"""Start and stop workers' training sessions.

A worker in a session has duty DRAFTER_TRAINING. It leaves that duty only by reporting
DrafterTrainingStopped or when its ranks die, so no worker trains and decodes at once.
"""

import msgspec

from tlt.base.id_types import WorkerId
from tlt.policies.drafter.used_and_fallback_drafters import lacks_drafter, refusers
from tlt.policies.run.run_state import (
    Duty,
    Phase,
    RunState,
    Turn,
    WorkerState,
    all_engines,
    engines_on,
)
from tlt.protocol.commands import StopDrafterTraining, TrainDrafter

TRAINING = (Duty.DRAFTER_TRAINING, Duty.STOPPING)


def is_any_open(state: RunState) -> bool:
    return engines_on(state, TRAINING) > 0


def is_open(worker: WorkerState, session: int) -> bool:
    return worker.duty in TRAINING and worker.training_session == session


def is_eligible(state: RunState, worker: WorkerState) -> bool:
    """Return False for a worker without the drafter in use.

    It would train from other weights than the others, and evaluate against less.
    """
    incarnations = (known.info.incarnation for known in state.workers.values())
    return not lacks_drafter(state.drafter.adoption, worker.info.incarnation, incarnations)


def start(turn: Turn, worker: WorkerId) -> None:
    progress = turn.state.drafter.progress
    session = progress.sessions + 1
    turn.set_drafter(progress=msgspec.structs.replace(progress, sessions=session))
    turn.assign(worker, Duty.DRAFTER_TRAINING, training_session=session)
    _send_base(turn, turn.state.workers[worker])


def redirect_all(turn: Turn) -> None:
    """Send the new base to all members that could load the drafter in use, and stop the others."""
    stop_ineligible(turn)
    for worker in turn.state.workers.values():
        redirect(turn, worker)


def redirect(turn: Turn, worker: WorkerState) -> None:
    if worker.duty is Duty.DRAFTER_TRAINING:
        _send_base(turn, worker)


def _send_base(turn: Turn, worker: WorkerState) -> None:
    state = turn.state
    turn.emit(
        TrainDrafter(
            worker=worker.info.worker,
            incarnation=worker.info.incarnation,
            job=state.job,
            step=state.step,
            training_session=worker.training_session,
            base=state.drafter.lineage.base,
            members=_count_members(state),
            held_out=state.drafter.progress.held_out,
        )
    )


def _count_members(state: RunState) -> int:
    """Count the ranks in training; in reserved time all are, or begin at once."""
    if state.phase is Phase.RESERVED_TRAINING:
        return all_engines(state)
    return engines_on(state, (Duty.DRAFTER_TRAINING,))


def stop(turn: Turn, worker: WorkerId) -> None:
    current = turn.state.workers[worker]
    if current.duty is not Duty.DRAFTER_TRAINING:
        return
    turn.assign(worker, Duty.STOPPING)
    turn.emit(
        StopDrafterTraining(
            worker=worker,
            incarnation=current.info.incarnation,
            job=turn.state.job,
            training_session=current.training_session,
        )
    )


def stop_all(turn: Turn) -> None:
    for worker in turn.state.workers:
        stop(turn, worker)


def stop_ineligible(turn: Turn) -> None:
    if not refusers(turn.state.drafter.adoption):
        return
    for worker, known in turn.state.workers.items():
        if not is_eligible(turn.state, known):
            stop(turn, worker)
