"""A session as listeners follow it: its jobs, its workers and how its streams are."""

import asyncio
import contextlib
import time
from pathlib import Path

import msgspec
import redis.exceptions
import structlog

from tlt.config import SessionSpec
from tlt.dashboard.advice import Advice, about_session, ordered
from tlt.dashboard.broadcast import Channel
from tlt.dashboard.job_restarts import Restarts
from tlt.dashboard.on_demand_task import Follower
from tlt.dashboard.rollout_tail import Holding
from tlt.dashboard.session_health import Health, Watcher
from tlt.ids import JobId, JobStatus
from tlt.protocol.records import JobRecord
from tlt.session_files import is_up
from tlt.store.job_records import ENDED, Jobs
from tlt.store.redis_connection import GONE, Connection, shown

_TICK_SECONDS = 1.0
_LONGEST_PAUSE = 5.0
_JOBS = 200
# looking may take one part in so many of a core's time
_SHARE = 500
_encode = msgspec.json.Encoder().encode
_log = structlog.get_logger("dashboard")


class JobLine(msgspec.Struct, frozen=True, kw_only=True):
    job: JobId
    status: JobStatus
    error: str | None
    submitted: float
    folder: str
    steps: int
    # 0: it has not begun; of workers, lives that ended while it ran
    attempts: int
    losses: int


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    up: bool
    redis: str
    runs: str
    device: str
    planned_workers: int
    jobs: tuple[JobLine, ...]
    # older ones, not listed
    more: int
    health: Health
    advice: tuple[Advice, ...]


class SessionFeed(Follower):
    def __init__(self, spec: SessionSpec, connection: Connection) -> None:
        self.spec = spec
        self.jobs = Jobs(connection, spec)
        super().__init__(Channel(past=0))
        self._watcher = Watcher(connection, spec)
        self.up = is_up(Path(spec.folder))
        self._restarts = Restarts(Path(spec.folder) / "session")
        self._records: list[JobRecord] = []
        self._odd: str | None = None
        self._logged: str | None = None
        self._holding: dict[JobId, Holding | None] = {}
        self._said = b""

    async def view(self) -> SessionView:
        """As it is now, whatever goes wrong in looking at it."""
        try:
            self.up = is_up(Path(self.spec.folder))
            health = await self._look()
        except Exception as error:  # what another release wrote may fail anywhere
            health, self._holding = Health(odd=repr(error)), {}
            if health.odd != self._logged:
                self._logged = health.odd
                _log.exception("the session cannot be looked at")
        return self._view(health)

    def holding(self, job: JobId) -> Holding | None:
        """None where nobody knows."""
        return self._holding.get(job)

    def follows(self, job: JobId) -> bool:
        """Whether the session is at it, or will be."""
        ended = any(each.job == job and each.status in ENDED for each in self._records)
        return self.up and not ended

    def listen(self, bell: asyncio.Event) -> None:
        """Who comes after nobody listened is not told what was then."""
        if not self.channel.listeners:
            self._said = b""
        super().listen(bell)

    def whole(self) -> bytes:
        return self._said or b"null"

    async def _follow(self) -> None:
        while self.channel.listeners:
            begun = time.thread_time()
            said = _encode(await self.view())
            spent = time.thread_time() - begun
            if said != self._said:
                self._said = said
                self.channel.publish(said)
            await asyncio.sleep(min(_LONGEST_PAUSE, max(_TICK_SECONDS, _SHARE * spent)))

    async def _look(self) -> Health:
        # while Redis is away, what it said last is still the best that is known
        with contextlib.suppress(*GONE, redis.exceptions.RedisError):
            self._records, self._odd = await self.jobs.readable()
        current = next((r.job for r in self._records if r.status == "running"), None)
        health, holding = await self._watcher.look(current)
        self._holding = {} if current is None else {current: holding}
        self._restarts.look()
        return health if self._odd is None else msgspec.structs.replace(health, odd=self._odd)

    def _view(self, health: Health) -> SessionView:
        newest = self._records[-_JOBS:]
        return SessionView(
            name=self.spec.name,
            up=self.up,
            redis=shown(self.spec.redis_url),
            runs=self.spec.runs,
            device=self.spec.device,
            planned_workers=self.spec.workers,
            jobs=tuple(
                JobLine(
                    job=record.job,
                    status=record.status,
                    error=record.error,
                    submitted=record.submitted,
                    folder=record.folder,
                    steps=record.spec.algorithm.steps,
                    attempts=self._restarts.attempts[record.job],
                    losses=self._restarts.losses[record.job],
                )
                for record in reversed(newest)
            ),
            more=len(self._records) - len(newest),
            health=health,
            advice=ordered(tuple(about_session(health, self.up))),
        )
