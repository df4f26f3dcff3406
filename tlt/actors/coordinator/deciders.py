"""Send each event to the deciders that it concerns: the session's and those of the jobs' runs.

A run is open from its job's start to its end, while it is paused too, because answers may be scored
and events read late. A run hears of the workers that its job has, and of those that it has lost.
"""

import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import structlog

from tlt.actors.coordinator.open_runs import OpenRuns
from tlt.actors.coordinator.redis_effects import Caused, Effects
from tlt.base.id_types import Incarnation, JobId, WorkerId
from tlt.errors import JournalError
from tlt.policies.run.run_state import RunState
from tlt.policies.session import job_queue
from tlt.policies.session.session_state import SessionState
from tlt.policies.session.workers_of_jobs import owner_of
from tlt.protocol.commands import (
    AssignWorker,
    CancelJob,
    CloseJob,
    Command,
    ContinueJob,
    EndJob,
    PauseJob,
    ResumeJob,
    StartJob,
    SuspendJob,
)
from tlt.protocol.events import (
    AnyEvent,
    JobPrepared,
    JobRefused,
    JobSubmitted,
    SessionResumed,
    WorkerJoined,
    WorkerLost,
    WorkerReplaced,
)
from tlt.spec.config import SessionSpec
from tlt.store.job_requests import new_record
from tlt.store.journal_replayed_state import DeciderState

SESSION = "session"
_log = structlog.get_logger("coordinator")


class Deciders:
    def __init__(self, spec: SessionSpec, effects: Effects) -> None:
        self.session: DeciderState[SessionState]
        self.runs = OpenRuns(spec, effects)
        self._spec = spec
        self._effects = effects

    def running(self) -> dict[JobId, DeciderState[RunState]]:
        """Return the runs that have workers, or wait for them: not those that are paused."""
        in_hand = self.session.state.in_hand
        return {job: run for job, run in self.runs.unended().items() if job in in_hand}

    def awaited_workers(self) -> dict[WorkerId, Incarnation]:
        """Return the last incarnations of workers that are starting fresh ranks."""
        session = self.session.state
        awaited = set(session.returning_workers)
        for run in self.running().values():
            awaited |= run.state.returning_workers
        return {worker: session.newest_incarnations[worker] for worker in awaited}

    async def open(self) -> list[AnyEvent]:
        """Rebuild the state of the session and of the runs that have not ended.

        Return the ends of those whose state cannot be rebuilt.
        """
        self.session = DeciderState(
            Path(self._spec.folder) / SESSION,
            await self._effects.committed(SESSION),
            SessionState(),
            job_queue.decide,
        )
        ends: list[AnyEvent] = []
        for job, entry in self.session.state.jobs.items():
            if not job_queue.has_run(entry):
                continue
            try:
                await self.runs.open(job, entry.spec)
            except (JournalError, OSError) as error:
                self.runs.forget(job)
                ends.append(EndJob(job=job, status="failed", error=str(error)))
        self.runs.log(self.running())
        return ends

    async def decide(self, event: AnyEvent) -> list[Caused]:
        """Decide an event, and the events for other deciders that its commands lead to."""
        caused = await self._decide((decider, event) for decider in self._addressees(event))
        if isinstance(event, WorkerJoined):
            caused += await self._decide(self._replacements(event))
        return caused

    async def _decide(self, events: Iterable[tuple[DeciderState[Any], AnyEvent]]) -> list[Caused]:
        caused: list[Caused] = []
        undecided = deque(events)
        while undecided:
            decider: DeciderState[Any]
            decider, event = undecided.popleft()
            run = None if decider is self.session else decider.state.job
            for command in decider.decide(event, time.time()):
                caused.append(Caused(command, event, run))
                match command:
                    case StartJob() | CancelJob() | PauseJob() | ContinueJob() | AssignWorker():
                        undecided.append(await self._pass_to_run(command))
                    case SuspendJob() | EndJob():
                        undecided.append((self.session, command))
                    case _:
                        pass
        return caused

    async def _pass_to_run(
        self, command: StartJob | CancelJob | PauseJob | ContinueJob | AssignWorker
    ) -> tuple[DeciderState[Any], AnyEvent]:
        """Return the run that takes the session's command, or the session and the job's end."""
        job = command.job
        if isinstance(command, StartJob):
            try:
                await self.runs.open(job, command.spec)
            except (JournalError, OSError) as error:
                return self.session, EndJob(job=job, status="failed", error=str(error))
        if job not in self.runs.states:  # its end is on the way
            return self.session, EndJob(job=job, status="failed", error="its run is not open")
        if isinstance(command, AssignWorker):
            return self.runs.states[job], WorkerJoined(info=command.info)
        return self.runs.states[job], command

    def _addressees(self, event: AnyEvent) -> list[DeciderState[Any]]:
        open_runs = self.runs.unended()
        match event:
            case JobSubmitted():
                if event.job not in self._effects.records:
                    record = new_record(
                        event.job, event.spec, event.folder, event.starts_from, event.priority
                    )
                    self._effects.records[event.job] = record
                return [self.session]
            case JobPrepared() | JobRefused() | EndJob() | CancelJob() | PauseJob() | ResumeJob():
                return [self.session]
            case SessionResumed():
                return [self.session, *open_runs.values()]
            case WorkerJoined():
                owner = owner_of(self.session.state, event.info.worker)
                return [self.session, *(run for job, run in open_runs.items() if job == owner)]
            case WorkerLost():
                owner = owner_of(self.session.state, event.worker)
                concerned = [
                    run
                    for job, run in self.running().items()
                    if job == owner or event.worker in run.state.newest_incarnations
                ]
                return [self.session, *concerned]
            case _:
                return [open_runs[event.job]] if event.job in open_runs else []

    def _replacements(self, event: WorkerJoined) -> list[tuple[DeciderState[Any], AnyEvent]]:
        """Tell runs whose lost worker has joined that it isn't theirs any more."""
        worker, incarnation = event.info.worker, event.info.incarnation
        owner = owner_of(self.session.state, worker)
        return [
            (run, WorkerReplaced(job=job, worker=worker))
            for job, run in self.running().items()
            if job != owner and run.state.newest_incarnations.get(worker, incarnation) < incarnation
        ]

    async def fail_run(
        self, run: DeciderState[RunState], caused: list[Caused], error: str
    ) -> list[Caused]:
        """End a job whose folder cannot be written; the decisions of its batch did not happen."""
        job = run.state.job
        _log.error("job failed", job=job, error=error)
        end = EndJob(job=job, status="failed", error=error)
        closing: list[Command] = [
            CloseJob(worker=w.info.worker, incarnation=w.info.incarnation, job=job)
            for w in run.state.workers.values()
        ]
        run.journal.close()
        self.runs.forget(job)
        return [
            *(one for one in caused if one.run != job),
            *(Caused(command, end, job) for command in (*closing, end)),
            *await self._decide([(self.session, end)]),
        ]

    def after_commit(self) -> None:
        """Take snapshots that are due and close runs that have ended."""
        self.session.snapshot_if_due()
        self.runs.take_snapshots()
        self.runs.log(self.running())
