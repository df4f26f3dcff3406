"""Settle answers, and assign workers whose queue is drained to another duty."""

from tlt.policies.run import (
    drafter_merges,
    drafter_training_scheduler,
    dynamic_sampling,
    phase_transitions,
    rollout_batch,
    rollout_batch_opening,
)
from tlt.policies.run.rollout_batch_opening import ROLLOUT_PHASES
from tlt.policies.run.run_state import Duty, Turn, current_worker
from tlt.protocol.events import (
    DrafterTrainingStopped,
    RolloutDropped,
    RolloutFinished,
    RolloutScored,
    WorkerIdled,
)


def settle(turn: Turn, event: RolloutFinished | RolloutScored | RolloutDropped) -> None:
    state = turn.state
    finished = isinstance(event, RolloutFinished)
    if state.batch is None or not rollout_batch.contains(state.batch, event):
        return
    if finished and current_worker(state, event.worker, event.incarnation) is None:
        return
    after = rollout_batch.settle(state.batch, event)
    if after is state.batch:
        return
    turn.set(batch=after)
    batch = dynamic_sampling.replace_if_agreed(turn, after, event.prompt)
    if batch.settled and state.phase in ROLLOUT_PHASES:
        phase_transitions.close_batch(turn)
    elif finished and event.purpose == "train":
        drafter_training_scheduler.start_idle_workers(turn)


def drain(turn: Turn, event: WorkerIdled) -> None:
    """Let a worker whose queue is drained train the drafter, unless prompts were added since."""
    state, batch = turn.state, turn.state.batch
    worker = current_worker(state, event.worker, event.incarnation)
    if worker is None or batch is None or worker.duty is not Duty.ROLLOUT:
        return
    drained = (event.step, event.purpose, event.requeues)
    if drained != (batch.step, batch.purpose, worker.refills):
        return
    if drained != batch.queue_key and state.phase in ROLLOUT_PHASES:
        rollout_batch_opening.assign(turn, event.worker)
        return
    turn.assign(event.worker, Duty.IDLE, drained_batch=drained)
    # a lost update that is being made again needs the worker
    if state.phase in ROLLOUT_PHASES:
        drafter_training_scheduler.start_if_worth(turn, event.worker)


def end_session(turn: Turn, event: DrafterTrainingStopped) -> None:
    """Give a worker that trained the drafter its next duty."""
    worker = current_worker(turn.state, event.worker, event.incarnation)
    if worker is None or not drafter_training_scheduler.is_open(worker, event.training_session):
        return
    merging = drafter_merges.is_merging(turn.state, event.worker)
    drafter_training_scheduler.set_idle(turn, worker)
    batch = turn.state.batch
    if turn.state.phase not in ROLLOUT_PHASES or batch is None:
        phase_transitions.advance(turn)
    elif worker.drained_batch != batch.queue_key:
        rollout_batch_opening.assign(turn, event.worker)
    elif merging:
        # it was stopped because it didn't merge; now any idle worker may, this one included
        drafter_training_scheduler.start_if_worth(turn, event.worker)
