"""Jobs and workers of a session: one job runs at a time, by priority, then by submission.

A job that is paused keeps its run, and queues again when it is resumed. A running one stays
`running` until its run has given back all workers.
"""

from typing import assert_never

import msgspec

from tlt.config import JobSpec
from tlt.id_types import Incarnation, JobId, JobStatus, WorkerId
from tlt.protocol.commands import (
    CancelJob,
    PauseJob,
    PrepareJob,
    RecordStatus,
    ResumeJob,
    SessionCommand,
    StartJob,
)
from tlt.protocol.events import (
    JobCancelRequested,
    JobEnded,
    JobPaused,
    JobPauseRequested,
    JobPrepared,
    JobRefused,
    JobResumeRequested,
    JobSubmitted,
    SessionEvent,
    SessionResumed,
    WorkerJoined,
    WorkerLost,
)
from tlt.protocol.refs import StartingCheckpoint
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


class Job(msgspec.Struct, frozen=True, kw_only=True):
    spec: JobSpec
    folder: str
    status: JobStatus = "queued"
    starts_from: StartingCheckpoint | None = None
    priority: int = 0
    # its run has begun, and may go on without another preparation
    started: bool = False
    # of the policy, all and those that are trained; 0 if unknown
    policy_weights: int = 0
    trained_weights: int = 0
    # it is paused, or will be once its workers are free
    pause: Pause | None = None


class SessionState(msgspec.Struct, frozen=True, kw_only=True):
    # jobs that have not ended, in the order of submission
    jobs: dict[JobId, Job] = {}
    # all jobs that were ever submitted
    seen: frozenset[JobId] = frozenset()
    workers: dict[WorkerId, WorkerInfo] = {}
    newest_incarnations: dict[WorkerId, Incarnation] = {}

    @property
    def current(self) -> JobId | None:
        """Return the job that is being prepared or runs."""
        in_hand = ("preparing", "running")
        return next((j for j, job in self.jobs.items() if job.status in in_hand), None)


Decision = tuple[SessionState, list[SessionCommand]]


def decide(state: SessionState, event: SessionEvent, now: float) -> Decision:
    match event:
        case JobSubmitted():
            return _submit(state, event)
        case JobCancelRequested():
            return _cancel(state, event.job)
        case JobPauseRequested():
            return _pause(state, event, now)
        case JobResumeRequested():
            return _resume(state, event)
        case JobPaused():
            return _suspend(state, event.job)
        case JobPrepared():
            return _start(state, event)
        case JobRefused():
            if _status(state, event.job) != "preparing":
                return state, []
            return _finish(state, event.job, "failed", event.error)
        case JobEnded():
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
            return state, list(again)
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
    if event.job in state.seen:
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
        seen=state.seen | {event.job},
    )
    return _next(state, [])


def _start(state: SessionState, event: JobPrepared) -> Decision:
    if _status(state, event.job) != "preparing":
        return state, []
    state, recorded = _record(state, event.job, "running", None)
    state = _change(
        state,
        event.job,
        started=True,
        policy_weights=event.policy_weights,
        trained_weights=event.trained_weights,
    )
    entry = state.jobs[event.job]
    start = StartJob(
        job=event.job,
        spec=entry.spec,
        folder=entry.folder,
        train_prompts=event.train_prompts,
        eval_prompts=event.eval_prompts,
        eval_sets=event.eval_sets,
        skipped_prompts=event.skipped_prompts,
        workers=tuple(state.workers.values()),
        starts_from=entry.starts_from,
        train_sources=event.train_sources,
    )
    return state, [recorded, start]


def _cancel(state: SessionState, job: JobId) -> Decision:
    entry = state.jobs.get(job)
    if entry is None:
        return state, []
    if has_run(entry):
        return state, [CancelJob(job=job)]
    return _finish(state, job, "cancelled", None)


def has_run(job: Job) -> bool:
    """Return True if its run can end it; states of earlier versions don't say that it started."""
    return job.started or job.status == "running"


def _pause(state: SessionState, event: JobPauseRequested, now: float) -> Decision:
    """Pause a job; the pause that a user asked for replaces the session's, but not vice versa."""
    entry = state.jobs.get(event.job)
    if entry is None:
        return state, []
    if entry.pause is not None and (event.shortage is not None or entry.pause.shortage is None):
        return state, []
    since = now if entry.pause is None else entry.pause.since
    begins = entry.pause is None
    state = _change(state, event.job, pause=Pause(since=since, shortage=event.shortage))
    if entry.status == "running":
        return state, [PauseJob(job=event.job)] if begins else []
    state, recorded = _record(state, event.job, "paused", None)
    return _next(state, [recorded])


def _resume(state: SessionState, event: JobResumeRequested) -> Decision:
    """Queue a paused job; one that is giving back its workers queues once they are free."""
    entry = state.jobs.get(event.job)
    if entry is None or entry.pause is None:
        return state, []
    if event.by_session and entry.pause.shortage is None:
        return state, []
    state = _change(state, event.job, pause=None)
    if entry.status != "paused":
        return state, []
    state, recorded = _record(state, event.job, "queued", None)
    return _next(state, [recorded])


def _suspend(state: SessionState, job: JobId) -> Decision:
    entry = state.jobs.get(job)
    if entry is None or entry.status != "running":
        return state, []
    status = "queued" if entry.pause is None else "paused"
    state, recorded = _record(state, job, status, None)
    return _next(state, [recorded])


def _finish(state: SessionState, job: JobId, status: JobStatus, error: str | None) -> Decision:
    state, recorded = _record(state, job, status, error)
    jobs = {other: entry for other, entry in state.jobs.items() if other != job}
    return _next(msgspec.structs.replace(state, jobs=jobs), [recorded])


def _next(state: SessionState, commands: list[SessionCommand]) -> Decision:
    waiting = [(job, entry) for job, entry in state.jobs.items() if entry.status == "queued"]
    if state.current is not None or not waiting:
        return state, commands
    # of equals, `max` returns the one that was submitted first
    job, entry = max(waiting, key=lambda item: item[1].priority)
    if entry.started:
        state, recorded = _record(state, job, "running", None)
        resume = ResumeJob(
            job=job,
            workers=tuple(state.workers.values()),
            newest_incarnations=state.newest_incarnations,
        )
        return state, [*commands, recorded, resume]
    state, recorded = _record(state, job, "preparing", None)
    return state, [*commands, recorded, PrepareJob(job=job, spec=entry.spec, folder=entry.folder)]


def _record(
    state: SessionState, job: JobId, status: JobStatus, error: str | None
) -> tuple[SessionState, RecordStatus]:
    entry = state.jobs[job]
    if status not in STATUSES[entry.status]:
        raise AssertionError(f"{job} cannot go from {entry.status} to {status}")
    pause = entry.pause if status == "paused" else None
    return (
        _change(state, job, status=status),
        RecordStatus(job=job, status=status, error=error, pause=pause),
    )


def _change(state: SessionState, job: JobId, **changes: object) -> SessionState:
    jobs = {**state.jobs, job: msgspec.structs.replace(state.jobs[job], **changes)}
    return msgspec.structs.replace(state, jobs=jobs)


def _join(state: SessionState, info: WorkerInfo) -> SessionState:
    if info.incarnation <= state.newest_incarnations.get(info.worker, -1):
        return state
    return msgspec.structs.replace(
        state,
        workers={**state.workers, info.worker: info},
        newest_incarnations={**state.newest_incarnations, info.worker: info.incarnation},
    )


def _lose(state: SessionState, event: WorkerLost) -> SessionState:
    known = state.workers.get(event.worker)
    newest = max(event.incarnation, state.newest_incarnations.get(event.worker, Incarnation(-1)))
    workers = state.workers
    if known is not None and known.incarnation <= event.incarnation:
        workers = {worker: info for worker, info in workers.items() if worker != event.worker}
    return msgspec.structs.replace(
        state,
        workers=workers,
        newest_incarnations={**state.newest_incarnations, event.worker: newest},
    )
