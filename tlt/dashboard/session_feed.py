"""A session as its listeners follow it: jobs, workers and the health of its streams."""

import asyncio
import contextlib
import time
from pathlib import Path

import msgspec
import redis.exceptions
import structlog

from tlt.base.id_types import JobId, JobStatus
from tlt.dashboard.broadcast import Broadcast
from tlt.dashboard.job_attempt_counts import JobRestarts
from tlt.dashboard.listener_driven_feed import Feed
from tlt.dashboard.rollout_tail import RunningAnswers
from tlt.dashboard.session_health import Health, HealthReader
from tlt.dashboard.warnings_and_remedies import Advice, advice_on_session, by_urgency
from tlt.protocol.shared_values import JobRecord
from tlt.session.fault_log import read_supervised
from tlt.session.session_files import is_up
from tlt.session.wait_description import describe_pause, describe_wait, describe_workers
from tlt.spec.config import SessionSpec
from tlt.store.job_requests import ENDED_STATUSES, Jobs
from tlt.store.redis_connection import CONNECTION_ERRORS, Connection, hide_password

TICK_SECONDS = 1.0
_LONGEST_PAUSE = 5.0
_LISTED_JOBS = 200
# reading takes at most one part in CORE_SHARE of a core's time
CORE_SHARE = 500
_encode = msgspec.json.Encoder().encode
_log = structlog.get_logger("dashboard")


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    job: JobId
    status: JobStatus
    error: str | None
    # why it is paused, and since when
    pause: str | None
    # what it waits for, if it is queued
    wait: str | None
    # the workers that it has, or how many it asks for
    workers: str
    submitted: float
    folder: str
    steps: int
    # 0: the job has not started
    attempts: int
    # incarnations of workers that ended while it ran
    losses: int


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    up: bool
    redis: str
    runs: str
    device: str
    jobs: tuple[JobRow, ...]
    # count of older jobs, which are not listed
    older_jobs: int
    health: Health
    advice: tuple[Advice, ...]


class SessionFeed(Feed):
    def __init__(self, spec: SessionSpec, connection: Connection) -> None:
        super().__init__(Broadcast(history=0))
        self.spec = spec
        self.jobs = Jobs(connection, spec)
        self.up = is_up(Path(spec.folder))
        self.health_reader = HealthReader(connection, spec)
        self._restarts = JobRestarts(Path(spec.folder) / "session")
        self._records: list[JobRecord] = []
        self._unreadable_record: str | None = None
        self._logged: str | None = None
        self._running_answers: dict[JobId, RunningAnswers] = {}
        self._message = b""

    async def view(self) -> SessionView:
        """Return the session as it is now; whatever cannot be read becomes a warning."""
        try:
            self.up = is_up(Path(self.spec.folder))
            health = await self._read()
        except Exception as error:  # data of another release may fail anywhere
            health, self._running_answers = Health(unreadable=repr(error)), {}
            if health.unreadable != self._logged:
                self._logged = health.unreadable
                _log.exception("the session cannot be read")
        return self._view(health)

    def running_answers(self, job: JobId) -> RunningAnswers | None:
        """Return the job's running answers, or None where they are not known."""
        return self._running_answers.get(job)

    def running_jobs(self) -> list[JobId]:
        return [record.job for record in self._records if record.status == "running"]

    def serves(self, job: JobId) -> bool:
        """Return True if the session is up, and runs the job or will run it."""
        ended = any(each.job == job and each.status in ENDED_STATUSES for each in self._records)
        return self.up and not ended

    def add_listener(self, wakeup: asyncio.Event) -> None:
        if not self.broadcast.listeners:
            self._message = b""  # it is as old as the last listener
        super().add_listener(wakeup)

    def full_state(self) -> bytes:
        return self._message or b"null"

    async def _follow(self) -> None:
        while self.broadcast.listeners:
            begun = time.thread_time()
            message = _encode(await self.view())
            spent = time.thread_time() - begun
            if message != self._message:
                self._message = message
                self.broadcast.publish(message)
            await asyncio.sleep(min(_LONGEST_PAUSE, max(TICK_SECONDS, CORE_SHARE * spent)))

    async def _read(self) -> Health:
        # while Redis does not answer, the last records are the best that is known
        with contextlib.suppress(*CONNECTION_ERRORS, redis.exceptions.RedisError):
            self._records, self._unreadable_record = await self.jobs.readable()
        health, self._running_answers = await self.health_reader.read(self.running_jobs())
        self._restarts.update()
        if self._unreadable_record is None:
            return health
        return msgspec.structs.replace(health, unreadable=self._unreadable_record)

    def _view(self, health: Health) -> SessionView:
        now = time.time()
        faults = read_supervised(Path(self.spec.folder)).recent(now)
        newest = self._records[-_LISTED_JOBS:]
        return SessionView(
            name=self.spec.name,
            up=self.up,
            redis=hide_password(self.spec.redis_url),
            runs=self.spec.runs,
            device=self.spec.device,
            jobs=tuple(map(self._job_row, reversed(newest))),
            older_jobs=len(self._records) - len(newest),
            health=health,
            advice=by_urgency(advice_on_session(health, self.up, faults, now)),
        )

    def _job_row(self, record: JobRecord) -> JobRow:
        return JobRow(
            job=record.job,
            status=record.status,
            error=record.error,
            pause=describe_pause(record, time.time()),
            wait=describe_wait(record, self._records, self.spec.workers),
            workers=describe_workers(record, self.health_reader.heartbeats),
            submitted=record.submitted,
            folder=record.folder,
            steps=record.spec.algorithm.steps,
            attempts=self._restarts.attempts[record.job],
            losses=self._restarts.losses[record.job],
        )
