"""Decide how a job's run proceeds: `decide(state, event, now)` returns a state and commands.

Only `decide` changes a run's state. Events may be delivered repeatedly or late: one that no longer
applies changes nothing.
"""

from typing import assert_never

from tlt.base.id_types import Epoch, JobId
from tlt.policies.run import (
    answers_and_next_duties,
    drafter_event_handling,
    drafter_merges,
    pausing,
    phase_transitions,
    policy_updates,
    run_start_and_resume,
    skipped_updates,
    stop_losing_speculation,
    worker_membership,
)
from tlt.policies.run.run_state import Phase, RunState, Turn, current_worker
from tlt.protocol.commands import CancelJob, ContinueJob, PauseJob, RunCommand, StartJob
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
    RolloutDropped,
    RolloutFinished,
    RolloutScored,
    RunEvent,
    SessionResumed,
    WorkerFailed,
    WorkerIdled,
    WorkerJoined,
    WorkerLost,
    WorkerReplaced,
)
from tlt.spec.config import JobSpec


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
        case RolloutFinished() | RolloutScored() | RolloutDropped():
            answers_and_next_duties.settle(turn, event)
        case WorkerIdled():
            answers_and_next_duties.drain(turn, event)
        case PolicyUpdateFinished():
            if policy_updates.is_new_report(state, event):
                policy_updates.finish_part(turn, event)
                phase_transitions.advance(turn)
        case PolicyPublished():
            if policy_updates.is_awaited(state, event):
                policy_updates.adopt_policy(turn, event.policy)
                skipped_updates.count_skipped(turn, event.metrics)
                phase_transitions.advance(turn)
            else:
                policy_updates.release_passed(turn, event)
        case CheckpointCommitted():
            policy_updates.record_checkpoint(turn, event)
        case DrafterDeltaReady():
            drafter_merges.record_delta(turn, event)
        case DrafterTrainingStopped():
            answers_and_next_duties.end_session(turn, event)
        case DrafterMerged():
            drafter_event_handling.finish_merge(turn, event)
        case DrafterDiverged():
            drafter_event_handling.restart_diverged(turn, event)
        case DrafterCommitFailed():
            drafter_event_handling.record_failed_commit(turn, event)
        case DrafterRefused():
            drafter_event_handling.record_refusal(turn, event)
        case DecodingReported():
            stop_losing_speculation.record_decoding(turn, event)
        case _:
            assert_never(event)
    return turn.state, turn.commands
