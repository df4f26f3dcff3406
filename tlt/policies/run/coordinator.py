"""Decide how a job's run proceeds: `decide(state, event, now)` returns a state and commands.

Only `decide` changes a run's state. Events may be delivered repeatedly or late: one that no longer
applies changes nothing.
"""

from typing import assert_never

from tlt.base.id_types import Epoch, JobId
from tlt.policies.run import (
    chosen_sizes,
    drafter_merges,
    drafter_outcomes,
    drafter_training_scheduler,
    dynamic_sampling,
    partial_rollouts,
    pausing,
    phase_transitions,
    policy_updates,
    rollout_batch,
    rollout_batch_opening,
    run_start_and_resume,
    run_state,
    stop_losing_speculation,
    worker_membership,
)
from tlt.policies.run.rollout_batch_opening import ROLLOUT_PHASES
from tlt.policies.run.run_state import Duty, Phase, RunState, Turn, current_worker
from tlt.protocol.commands import (
    CancelJob,
    ContinueJob,
    PauseJob,
    ResumeAnswers,
    RunCommand,
    StartJob,
)
from tlt.protocol.events import (
    CheckpointCommitted,
    DecodingReported,
    DrafterCommitFailed,
    DrafterDeltaReady,
    DrafterDiverged,
    DrafterMerged,
    DrafterRefused,
    DrafterTrainingStopped,
    PolicyPublished,
    PolicyUpdateFinished,
    RolloutCut,
    RolloutDropped,
    RolloutFinished,
    RolloutScored,
    RunEvent,
    SessionResumed,
    SizesChosen,
    WorkerFailed,
    WorkerIdled,
    WorkerJoined,
    WorkerLost,
    WorkerReplaced,
)
from tlt.protocol.shared_values import UpdateMetrics
from tlt.spec.config import JobSpec

# policy updates in a row without an optimiser step
_MOST_SKIPPED = 5


def new_run(job: JobId, spec: JobSpec) -> RunState:
    return RunState(job=job, epoch=Epoch(0), spec=spec, train_prompts=0, eval_sets=())


def decide(state: RunState, event: RunEvent, now: float) -> tuple[RunState, list[RunCommand]]:
    if state.phase is Phase.ENDED:
        return state, []
    turn = Turn(state, now)
    match event:
        case StartJob():
            run_start_and_resume.start(turn, event)
        case CancelJob():
            phase_transitions.end_job(turn, "cancelled", None)
        case PauseJob():
            pausing.pause(turn)
        case ContinueJob():
            pausing.resume(turn, event)
        case SessionResumed():
            run_start_and_resume.resume(turn, event)
        case WorkerJoined():
            worker_membership.join(turn, event.info)
        case WorkerLost():
            worker_membership.lose(turn, event)
        case WorkerReplaced():
            worker_membership.forget(turn, event.worker)
        case WorkerFailed():
            if current_worker(state, event.worker, event.incarnation) is not None:
                phase_transitions.end_job(turn, "failed", event.error)
        case SizesChosen():
            chosen_sizes.record(turn, event)
        case RolloutFinished() | RolloutScored() | RolloutDropped():
            settle(turn, event)
        case RolloutCut():
            record_cut(turn, event)
        case WorkerIdled():
            drain(turn, event)
        case PolicyUpdateFinished():
            if policy_updates.is_new_report(state, event):
                policy_updates.finish_part(turn, event)
                phase_transitions.advance(turn)
        case PolicyPublished():
            if policy_updates.is_awaited(state, event):
                policy_updates.adopt_policy(turn, event.policy)
                count_skipped(turn, event.metrics)
                phase_transitions.advance(turn)
            else:
                policy_updates.release_passed(turn, event)
        case CheckpointCommitted():
            policy_updates.record_checkpoint(turn, event)
        case DrafterDeltaReady():
            drafter_merges.record_delta(turn, event)
        case DrafterTrainingStopped():
            end_session(turn, event)
        case DrafterMerged():
            drafter_outcomes.finish_merge(turn, event)
        case DrafterDiverged():
            drafter_outcomes.restart_diverged(turn, event)
        case DrafterCommitFailed():
            drafter_outcomes.record_failed_commit(turn, event)
        case DrafterRefused():
            drafter_outcomes.record_refusal(turn, event)
        case DecodingReported():
            stop_losing_speculation.record_decoding(turn, event)
        case _:
            assert_never(event)
    return turn.state, turn.commands


def settle(turn: Turn, event: RolloutFinished | RolloutScored | RolloutDropped) -> None:
    """Settle an answer, and close the batch with its last one."""
    state = turn.state
    finished = isinstance(event, RolloutFinished)
    if finished and current_worker(state, event.worker, event.incarnation) is None:
        return
    before = run_state.batch_with(state, event)
    if before is None:
        partial_rollouts.settle_carried(turn, event)
        return
    after = rollout_batch.settle(before, event)
    if after is before:
        return
    turn.set_batch(after)
    # the next step's batch can't end yet
    if before is state.batch:
        batch = dynamic_sampling.replace_if_agreed(turn, after, event.prompt)
        if batch.settled and state.phase in ROLLOUT_PHASES:
            phase_transitions.close_batch(turn)
            return
    if finished and event.purpose == "train":
        drafter_training_scheduler.start_idle_workers(turn)


def record_cut(turn: Turn, event: RolloutCut) -> None:
    """Keep an unfinished answer's tokens; if its batch is open, put it back into the queue."""
    state = turn.state
    if current_worker(state, event.worker, event.incarnation) is None:
        return
    if (batch := run_state.batch_with(state, event)) is None:
        partial_rollouts.settle_carried(turn, event)
        return
    after = rollout_batch.settle(batch, event)
    if after is batch:
        return
    answer = after.groups[event.prompt].members[event.member]
    again = partial_rollouts.resumed(event.step, event.prompt, event.member, answer)
    turn.emit(ResumeAnswers(job=state.job, epoch=state.epoch, answers=(again,)))
    queued = rollout_batch.queue_again(after, event.prompt, event.member)
    rollout_batch_opening.refill(turn, queued)


def drain(turn: Turn, event: WorkerIdled) -> None:
    """Let a worker whose queue is drained decode the next step's prompts, or train the drafter."""
    state = turn.state
    worker = current_worker(state, event.worker, event.incarnation)
    if worker is None or worker.duty is not Duty.ROLLOUT:
        return
    if (batch := rollout_batch_opening.batch_of(state, worker)) is None:
        return
    drained = (event.step, event.purpose, event.requeues)
    if drained != (batch.step, batch.purpose, worker.refills):
        return
    turn.assign(event.worker, Duty.IDLE, drained=worker.with_drained(drained))
    # a lost update that is being made again needs the worker
    if state.phase not in ROLLOUT_PHASES:
        return
    if not rollout_batch_opening.assign_next(turn, event.worker):
        drafter_training_scheduler.start_if_worth(turn, event.worker)


def count_skipped(turn: Turn, metrics: UpdateMetrics | None) -> None:
    """Fail a job whose gradients stay infinite: its weights don't change any more."""
    if metrics is None or (metrics.optimiser_steps == 0 and metrics.skipped_steps == 0):
        return
    skipped = 0 if metrics.optimiser_steps else turn.state.policy.skipped_updates + 1
    turn.set_policy(skipped_updates=skipped)
    if skipped >= _MOST_SKIPPED:
        complaint = (
            f"the gradients of {skipped} policy updates in a row were not finite; "
            "the weights were left as they were"
        )
        phase_transitions.end_job(turn, "failed", complaint)


def end_session(turn: Turn, event: DrafterTrainingStopped) -> None:
    """Give a worker that trained the drafter its next duty."""
    worker = current_worker(turn.state, event.worker, event.incarnation)
    if worker is None or not drafter_training_scheduler.is_open(worker, event.training_session):
        return
    merging = drafter_merges.is_merging(turn.state, event.worker)
    drafter_training_scheduler.record_stop(turn, event.seconds)
    drafter_training_scheduler.set_idle(turn, worker)
    batch = turn.state.batch
    if turn.state.phase not in ROLLOUT_PHASES or batch is None:
        if merging:
            drafter_training_scheduler.record_failure(turn)
        phase_transitions.advance(turn)
    elif not rollout_batch_opening.assign_next(turn, event.worker) and merging:
        # it was stopped because it didn't merge; now any idle worker may, this one included
        drafter_training_scheduler.start_if_worth(turn, event.worker)
