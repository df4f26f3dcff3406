"""Send each event to the deciders that it concerns: the session's and the running job's."""

import time
from collections import deque
from pathlib import Path
from typing import Any

import structlog

from tlt.actors.effects import Caused, Effects
from tlt.actors.logger_process import LoggerProcesses
from tlt.answer_files import AnswerFiles
from tlt.blobs import Blobs
from tlt.config import JobSpec, SessionSpec
from tlt.errors import JournalError
from tlt.id_types import Epoch, JobId
from tlt.json_logs import serve_run
from tlt.policies import coordinator
from tlt.policies.job import job_queue
from tlt.policies.job.job_queue import SessionState
from tlt.policies.job.run_state import Phase, RunState
from tlt.protocol.commands import CancelJob, CloseJob, Command, FinishRun, StartJob
from tlt.protocol.events import (
    AnyEvent,
    JobCancelRequested,
    JobEnded,
    JobPrepared,
    JobRefused,
    JobStarted,
    JobSubmitted,
    SessionResumed,
    WorkerJoined,
    WorkerLost,
)
from tlt.store.job_records import new_record
from tlt.store.journal_replayed_state import DeciderState

SESSION = "session"
_log = structlog.get_logger("coordinator")


class Deciders:
    def __init__(self, spec: SessionSpec, effects: Effects) -> None:
        self.session: DeciderState[SessionState]
        self.job: DeciderState[RunState] | None = None
        self._spec = spec
        self._effects = effects
        self._epoch = Epoch(0)
        self._loggers = LoggerProcesses()

    async def open(self, epoch: Epoch) -> list[AnyEvent]:
        """Rebuild the state of the session and of the job that was running.

        Return the end of that job if its state cannot be rebuilt.
        """
        self._epoch = epoch
        self.session = DeciderState(
            Path(self._spec.folder) / SESSION,
            await self._effects.committed(SESSION),
            SessionState(),
            job_queue.decide,
        )
        job = self.session.state.current
        if job is None or self.session.state.jobs[job].status != "running":
            return []
        try:
            await self.open_run(job, self.session.state.jobs[job].spec)
        except (JournalError, OSError) as error:
            self.job = None
            return [JobEnded(job=job, status="failed", error=str(error))]
        return []

    async def open_run(self, job: JobId, spec: JobSpec) -> DeciderState[RunState]:
        folder = self.run_folder(job)
        serve_run(folder)
        committed = await self._effects.committed(job)
        self.job = DeciderState(
            folder, committed, coordinator.new_run(job, spec), coordinator.decide
        )
        await self._effects.open_run(job, spec, folder)
        self._loggers.start(folder, spec)
        return self.job

    def run_folder(self, job: JobId) -> Path:
        return Path(self._effects.records[job].folder)

    def blobs(self, job: JobId) -> Blobs:
        return Blobs(self._spec.job_flight(job), self.run_folder(job) / "blobs")

    def answers(self, job: JobId) -> AnswerFiles:
        return AnswerFiles(self.run_folder(job))

    async def decide(self, event: AnyEvent) -> list[Caused]:
        """Decide an event, and the events for the other decider that its commands lead to."""
        caused: list[Caused] = []
        undecided: deque[tuple[DeciderState[Any], AnyEvent]] = deque(
            (decider, event) for decider in self._addressees(event)
        )
        while undecided:
            decider, event = undecided.popleft()
            for command in decider.decide(event, time.time()):
                caused.append(Caused(command, event, by_session=decider is self.session))
                match command:
                    case StartJob():
                        undecided.append(await self._start_job(command))
                    case CancelJob() if self.job is not None:
                        undecided.append((self.job, JobCancelRequested(job=command.job)))
                    case FinishRun():
                        undecided.append((self.session, _job_ended(command)))
                    case _:
                        pass
        return caused

    def _addressees(self, event: AnyEvent) -> list[DeciderState[Any]]:
        running = self.job
        if running is not None and running.state.phase is Phase.ENDED:
            running = None
        match event:
            case JobSubmitted():
                if event.job not in self._effects.records:
                    record = new_record(
                        event.job, event.spec, event.folder, event.starts_from, event.priority
                    )
                    self._effects.records[event.job] = record
                return [self.session]
            case JobPrepared() | JobRefused() | JobEnded() | JobCancelRequested():
                return [self.session]
            case SessionResumed() | WorkerJoined() | WorkerLost():
                return [self.session] if running is None else [self.session, running]
            case _:
                if running is not None and running.state.job == event.job:
                    return [running]
                return []

    async def _start_job(self, command: StartJob) -> tuple[DeciderState[Any], AnyEvent]:
        try:
            run = await self.open_run(command.job, command.spec)
        except (JournalError, OSError) as error:
            return self.session, JobEnded(job=command.job, status="failed", error=str(error))
        return run, JobStarted(
            job=command.job,
            epoch=self._epoch,
            spec=command.spec,
            folder=command.folder,
            train_prompts=command.train_prompts,
            eval_prompts=command.eval_prompts,
            eval_sets=command.eval_sets,
            skipped_prompts=command.skipped_prompts,
            workers=command.workers,
            starts_from=command.starts_from,
            train_sources=command.train_sources,
        )

    def fail_run(
        self, run: DeciderState[RunState], caused: list[Caused], error: str
    ) -> list[Caused]:
        """End a job whose folder cannot be written; the decisions of its batch did not happen."""
        job = run.state.job
        _log.error("job failed", job=job, error=error)
        finished = FinishRun(job=job, status="failed", error=error)
        ended = _job_ended(finished)
        closing: list[Command] = [
            CloseJob(worker=w.info.worker, incarnation=w.info.incarnation, job=job)
            for w in run.state.workers.values()
        ]
        run.journal.close()
        self._forget_run()
        return [
            *(one for one in caused if one.by_session),
            *(Caused(command, ended, by_session=False) for command in (*closing, finished)),
            *(
                Caused(command, ended, by_session=True)
                for command in self.session.decide(ended, time.time())
            ),
        ]

    def after_commit(self) -> None:
        """Take snapshots that are due and close a run that has ended."""
        self.session.snapshot_if_due()
        if self.job is not None:
            self.job.snapshot_if_due()
            if self.job.state.phase is Phase.ENDED:
                self.job.close()
                self._forget_run()

    def _forget_run(self) -> None:
        self.job = None
        serve_run(None)


def _job_ended(command: FinishRun) -> JobEnded:
    return JobEnded(job=command.job, status=command.status, error=command.error)
