"""A worker: the unit of lease and scheduling. It outlives its ranks: heartbeat, backoff, numbers.

It moves messages and supervises; its ranks compute. When one life has ended, the next begins with
fresh ranks under a higher number.
"""

import asyncio
import contextlib
import os

import msgspec
import structlog

from tlt.actors.cancellation import IncarnationEnded
from tlt.actors.incarnation import WorkerIncarnation, WorkerPlace
from tlt.config import SessionSpec
from tlt.errors import RankError
from tlt.ids import Incarnation, WorkerId
from tlt.protocol.records import Heartbeat
from tlt.store import worker_fence
from tlt.store.redis_connection import GONE, connect, persistently
from tlt.store.redis_keys import Keys

_LONGEST_BACKOFF = 30.0
_PAGE = os.sysconf("SC_PAGE_SIZE")
_log = structlog.get_logger("worker")
_heartbeat = msgspec.msgpack.Encoder()


class Worker:
    """Outlives its incarnations: heartbeat, backoff, numbers."""

    def __init__(
        self,
        session: SessionSpec,
        worker: WorkerId,
        *,
        host: str,
        devices: list[str],
        cores: list[frozenset[int]],
    ) -> None:
        self._place = WorkerPlace(
            session=session,
            worker=worker,
            host=host,
            devices=devices,
            cores=cores,
            keys=Keys(session.name),
            connection=connect(session.redis_url),
        )
        self._life: WorkerIncarnation | None = None
        self._incarnation = Incarnation(0)
        self._beats = 0

    async def run(self) -> None:
        # A restarted actor begins with the number that its predecessor left, until it has its own.
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._beat())
            tasks.create_task(self._live())

    async def _live(self) -> None:
        failures = 0
        while True:
            number = await persistently(
                lambda: self._place.connection.incr(self._place.keys.incarnations), asyncio.sleep
            )
            self._incarnation = Incarnation(int(number))
            life = WorkerIncarnation(self._place, self._incarnation)
            try:
                await life.start()
                self._life = life
                await life.run()
            except (IncarnationEnded, RankError, worker_fence.Fenced) as end:
                _log.warning("incarnation ends", incarnation=self._incarnation, reason=str(end))
                await life.end(str(end))
            finally:
                self._life = None
                life.kill()
            failures = 1 if life.useful else failures + 1
            await asyncio.sleep(min(0.1 * 2 ** (failures - 1), _LONGEST_BACKOFF))

    async def _beat(self) -> None:
        while True:
            self._beats += 1
            beat = self._pulse()
            with contextlib.suppress(*GONE):
                await self._place.connection.hset(
                    self._place.keys.heartbeats, self._place.worker, _heartbeat.encode(beat)
                )
            await asyncio.sleep(self._place.session.heartbeat_seconds)

    def _pulse(self) -> Heartbeat:
        life = self._life
        ranks = () if life is None else tuple(rank.pid for rank in life.ranks)
        progress = [] if life is None else [rank.progress() for rank in life.ranks]
        return Heartbeat(
            incarnation=self._incarnation,
            counter=self._beats,
            progress=min((done for done, _ in progress), default=0),
            running=sum(running for _, running in progress),
            pid=os.getpid(),
            rank_pids=ranks,
            job=None if life is None or life.job is None else life.job.job,
            resident_bytes=sum(map(_resident, (os.getpid(), *ranks))),
        )


def _resident(pid: int) -> int:
    """0 for a process that is gone."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0
