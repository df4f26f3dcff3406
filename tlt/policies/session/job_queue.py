"""Jobs of a session start by priority, then by submission, as soon as their workers are free.

No job overtakes another: those behind the first of the queue wait with it, though workers may be
free. A job that is paused keeps its run, and queues again when it is resumed. A running one stays
`running` until its run has given back all workers.
"""

from typing import assert_never

import msgspec

from tlt.base.id_types import Incarnation, JobId, JobStatus
from tlt.policies.session import workers_of_jobs
from tlt.policies.session.session_state import Job, SessionState, change_job
from tlt.protocol.commands import (
    CancelJob,
    ContinueJob,
    EndJob,
    PauseJob,
    PrepareJob,
    RecordStatus,
    ResumeJob,
    SessionCommand,
    StartJob,
    SuspendJob,
)
from tlt.protocol.events import (
    JobPrepared,
    JobRefused,
    JobSubmitted,
    SessionEvent,
    SessionResumed,
    WorkerJoined,
    WorkerLost,
)
from tlt.protocol.shared_values import Pause, WorkerInfo

STATUSES: dict[JobStatus, frozenset[JobStatus]] = {
    "queued": frozenset({"preparing", "running", "paused", "failed", "cancelled"}),
    "preparing": frozenset({"running", "paused", "failed", "cancelled"}),
    "running": frozenset({"queued", "paused", "done", "failed", "cancelled"}),
    # while its reason changes it stays paused
    "paused": frozenset({"queued", "paused", "failed", "cancelled"}),
    "done": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}


Decision = tuple[SessionState, list[SessionCommand]]


def decide(state: SessionState, event: SessionEvent, now: float) -> Decision:
    return _start_waiting(*_note(state, event, now))


def _note(state: SessionState, event: SessionEvent, now: float) -> Decision:
    match event:
        case JobSubmitted():
            return _submit(state, event)
        case CancelJob():
            return _cancel(state, event)
        case PauseJob():
            return _pause(state, event, now)
        case ResumeJob():
            return _resume(state, event)
        case SuspendJob():
            return _suspend(state, event.job)
        case JobPrepared():
            return _start(state, event)
        case JobRefused():
            if _status(state, event.job) != "preparing":
                return state, []
            return _finish(state, event.job, "failed", event.error)
        case EndJob():
            if event.job not in state.jobs or not has_run(state.jobs[event.job]):
                return state, []
            return _finish(state, event.job, event.status, event.error)
        case SessionResumed():
            # The preparation that a lost coordinator had begun starts again.
            again = [
                PrepareJob(job=job, spec=entry.spec, folder=entry.folder)
                for job, entry in state.jobs.items()
                if entry.status == "preparing"
            ]
            return msgspec.structs.replace(state, epoch=event.epoch), list(again)
        case WorkerJoined():
            return _join(state, event.info), []
        case WorkerLost():
            return _lose(state, event), []
        case _:
            assert_never(event)


def _status(state: SessionState, job: JobId) -> JobStatus | None:
    entry = state.jobs.get(job)
    return None if entry is None else entry.status


def _submit(state: SessionState, event: JobSubmitted) -> Decision:
    if event.job in state.submitted_jobs:
        return state, []
    job = Job(
        spec=event.spec,
        folder=event.folder,
        starts_from=event.starts_from,
        priority=event.priority,
    )
    state = msgspec.structs.replace(
        state,
        jobs={**state.jobs, event.job: job},
        submitted_jobs=state.submitted_jobs | {event.job},
    )
    return state, []


def _start(state: SessionState, event: JobPrepared) -> Decision:
    if _status(state, event.job) != "preparing":
        return state, []
    state, recorded = _record(state, event.job, "running", None)
    state = change_job(state, event.job, started=True, prepared=event.prepared)
    entry = state.jobs[event.job]
    start = StartJob(
        job=event.job,
        epoch=state.epoch,
        spec=event.prepared.settle(entry.spec),
        folder=entry.folder,
        prepared=event.prepared,
        workers=workers_of_jobs.living_workers(state, event.job),
        starts_from=entry.starts_from,
    )
    return state, [recorded, start]


def _cancel(state: SessionState, event: CancelJob) -> Decision:
    entry = state.jobs.get(event.job)
    if entry is None:
        return state, []
    if has_run(entry):
        return state, [event]
    return _finish(state, event.job, "cancelled", None)


def has_run(job: Job) -> bool:
    """Return True if its run can end it; states of earlier versions don't say that it started."""
    return job.started or job.status == "running"


def _pause(state: SessionState, event: PauseJob, now: float) -> Decision:
    """Pause a job; the pause that a user asked for replaces the session's, but not vice versa."""
    entry = state.jobs.get(event.job)
    if entry is None:
        return state, []
    if entry.pause is not None and (event.shortage is not None or entry.pause.shortage is None):
        return state, []
    since = now if entry.pause is None else entry.pause.since
    begins = entry.pause is None
    state = change_job(state, event.job, pause=Pause(since=since, shortage=event.shortage))
    if entry.status == "running":
        return state, [event] if begins else []
    state, recorded = _record(state, event.job, "paused", None)
    return state, [recorded]


def _resume(state: SessionState, event: ResumeJob) -> Decision:
    """Queue a paused job; one that is giving back its workers queues once they are free."""
    entry = state.jobs.get(event.job)
    if entry is None or entry.pause is None:
        return state, []
    if event.by_session and entry.pause.shortage is None:
        return state, []
    state = change_job(state, event.job, pause=None)
    if entry.status != "paused":
        return state, []
    state, recorded = _record(state, event.job, "queued", None)
    return state, [recorded]


def _suspend(state: SessionState, job: JobId) -> Decision:
    entry = state.jobs.get(job)
    if entry is None or entry.status != "running":
        return state, []
    status = "queued" if entry.pause is None else "paused"
    state, recorded = _record(state, job, status, None)
    return state, [recorded]


def _finish(state: SessionState, job: JobId, status: JobStatus, error: str | None) -> Decision:
    state, recorded = _record(state, job, status, error)
    jobs = {other: entry for other, entry in state.jobs.items() if other != job}
    return msgspec.structs.replace(state, jobs=jobs), [recorded]


def _start_waiting(state: SessionState, commands: list[SessionCommand]) -> Decision:
    """Fill the places of lost workers, then start waiting jobs in their order while they can."""
    state, assignments = workers_of_jobs.replace_lost(state)
    commands = [*commands, *assignments]
    while (job := _first_waiting(state)) is not None:
        taken = workers_of_jobs.take_workers(state, job)
        if taken is None:
            break
        state, started = _begin(taken, job)
        commands += started
    return state, commands


def _first_waiting(state: SessionState) -> JobId | None:
    waiting = [job for job, entry in state.jobs.items() if entry.status == "queued"]
    # of equals, `max` returns the one that was submitted first
    return max(waiting, key=lambda job: state.jobs[job].priority, default=None)


def _begin(state: SessionState, job: JobId) -> Decision:
    entry = state.jobs[job]
    if entry.started:
        state, recorded = _record(state, job, "running", None)
        go_on = ContinueJob(
            job=job,
            workers=workers_of_jobs.living_workers(state, job),
            newest_incarnations=state.newest_incarnations,
        )
        return state, [recorded, go_on]
    state, recorded = _record(state, job, "preparing", None)
    return state, [recorded, PrepareJob(job=job, spec=entry.spec, folder=entry.folder)]


def _record(
    state: SessionState, job: JobId, status: JobStatus, error: str | None
) -> tuple[SessionState, RecordStatus]:
    entry = state.jobs[job]
    if status not in STATUSES[entry.status]:
        raise AssertionError(f"{job} cannot go from {entry.status} to {status}")
    pause = entry.pause if status == "paused" else None
    recorded = RecordStatus(job=job, status=status, error=error, pause=pause)
    state = change_job(state, job, status=status)
    if not state.jobs[job].in_hand:
        state = change_job(state, job, workers=())
    return state, recorded


def _join(state: SessionState, info: WorkerInfo) -> SessionState:
    if info.incarnation <= state.newest_incarnations.get(info.worker, -1):
        return state
    return msgspec.structs.replace(
        state,
        workers={**state.workers, info.worker: info},
        newest_incarnations={**state.newest_incarnations, info.worker: info.incarnation},
        returning_workers=state.returning_workers - {info.worker},
    )


def _lose(state: SessionState, event: WorkerLost) -> SessionState:
    worker, known = event.worker, state.workers.get(event.worker)
    newest = state.newest_incarnations.get(worker, Incarnation(-1))
    workers, returning = state.workers, state.returning_workers
    if known is not None and known.incarnation <= event.incarnation:
        workers = {name: info for name, info in workers.items() if name != worker}
        returning = returning | {worker} if event.returning else returning
    elif event.incarnation > newest or (event.incarnation == newest and not event.returning):
        # its successor has failed to start, or has ended before it joined
        returning = returning - {worker}
    return msgspec.structs.replace(
        state,
        workers=workers,
        newest_incarnations={
            **state.newest_incarnations,
            worker: max(event.incarnation, newest),
        },
        returning_workers=returning,
    )
