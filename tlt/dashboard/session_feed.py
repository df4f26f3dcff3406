"""A session as listeners follow it: its jobs, its workers and how its streams are."""

import asyncio
import contextlib
import time
from pathlib import Path

import msgspec
import redis.exceptions

from tlt.config import SessionSpec
from tlt.dashboard.advice import Advice, about_session, ordered
from tlt.dashboard.channel import Channel
from tlt.dashboard.follower import Follower
from tlt.dashboard.health import Health, Watcher
from tlt.dashboard.restarts import Restarts
from tlt.dashboard.tail import Holding
from tlt.messages import JobRecord
from tlt.session_files import is_up
from tlt.store.connection import GONE, Connection, shown
from tlt.store.jobs import Jobs
from tlt.types import JobId, JobStatus

_TICK_SECONDS = 1.0
_JOBS = 200
# looking may take one part in so many of the time
_SHARE = 40
_encode = msgspec.json.Encoder().encode


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
        self._restarts = Restarts(Path(spec.folder) / "session")
        self._records: list[JobRecord] = []
        self._holding: dict[JobId, Holding] = {}
        self._said = b""

    async def view(self) -> SessionView:
        """For who asks once and does not listen."""
        return await self._look()

    def holding(self, job: JobId) -> Holding:
        return self._holding.get(job, Holding())

    def whole(self) -> bytes:
        return self._said or b"null"

    async def _follow(self) -> None:
        while self.channel.listeners:
            begun = time.monotonic()
            said = _encode(await self._look())
            pause = max(_TICK_SECONDS, _SHARE * (time.monotonic() - begun))
            if said != self._said:
                self._said = said
                self.channel.publish(said)
            await asyncio.sleep(pause)

    async def _look(self) -> SessionView:
        # while Redis is away, what it said last is still the best that is known
        with contextlib.suppress(*GONE, redis.exceptions.RedisError):
            self._records = await self.jobs.all()
        current = next((r.job for r in self._records if r.status == "running"), None)
        health, holding = await self._watcher.look(current)
        self._holding = {} if current is None else {current: holding}
        self._restarts.look()
        newest = self._records[-_JOBS:]
        return SessionView(
            name=self.spec.name,
            up=is_up(Path(self.spec.folder)),
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
            advice=ordered(tuple(about_session(health))),
        )
