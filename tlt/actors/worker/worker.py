"""Run a worker, the unit of lease and scheduling: its incarnations and its heartbeats.

It passes on messages and supervises; its ranks compute. When an incarnation has ended, the next
one begins with fresh ranks and a higher number.
"""

import asyncio
import contextlib
import os
import time

import msgspec
import structlog

from tlt.actors.backoff import pause_after
from tlt.actors.run_until_one_fails import IncarnationEnded, run_until_one_fails
from tlt.actors.worker.rank_supervisor import WorkerIncarnation
from tlt.actors.worker.worker_context import WorkerSetup
from tlt.base.end_session_processes import identify
from tlt.base.id_types import Incarnation
from tlt.errors import RankError
from tlt.protocol.shared_values import Heartbeat
from tlt.store import worker_fence
from tlt.store.redis_connection import CONNECTION_ERRORS, connect, retry_until_connected
from tlt.store.redis_keys import Keys

_PAGE = os.sysconf("SC_PAGE_SIZE")
_log = structlog.get_logger("worker")
_heartbeat = msgspec.msgpack.Encoder()


class Worker:
    """A worker, which outlives its incarnations."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self.connection = connect(setup.session.redis_url)
        self._keys = Keys(setup.session.name)
        self._current: WorkerIncarnation | None = None
        self._incarnation = Incarnation(0)
        self._beats = 0
        self._process = identify(os.getpid())

    async def run(self) -> None:
        """Run until the actor's process ends."""
        await run_until_one_fails(self._send_heartbeats(), self._run_incarnations())

    async def _run_incarnations(self) -> None:
        failures = 0
        while True:
            number = await retry_until_connected(
                lambda: self.connection.incr(self._keys.incarnations)
            )
            self._incarnation = Incarnation(int(number))
            current = WorkerIncarnation(self._setup, self.connection, self._incarnation)
            try:
                await current.start()
                self._current = current
                await current.run()
            except (IncarnationEnded, RankError, worker_fence.Fenced) as end:
                _log.warning("incarnation ended", incarnation=self._incarnation, reason=str(end))
                await current.end(str(end))
            finally:
                self._current = None
                current.kill()
            failures = 1 if current.productive else failures + 1
            await asyncio.sleep(pause_after(failures, 0.1))

    async def _send_heartbeats(self) -> None:
        while True:
            self._beats += 1
            beat = _heartbeat.encode(self._heartbeat())
            with contextlib.suppress(*CONNECTION_ERRORS):
                await self.connection.hset(self._keys.heartbeats, self._setup.worker, beat)
            await asyncio.sleep(self._setup.session.heartbeat_seconds)

    def _heartbeat(self) -> Heartbeat:
        current = self._current
        ranks = () if current is None else tuple(rank.pid for rank in current.ranks)
        progress = [] if current is None else [rank.progress() for rank in current.ranks]
        return Heartbeat(
            incarnation=self._incarnation,
            counter=self._beats,
            progress=min((done for done, _ in progress), default=0),
            running=sum(running for _, running in progress),
            pid=os.getpid(),
            rank_pids=ranks,
            job=None if current is None else current.job,
            resident_bytes=sum(map(_resident_bytes, (os.getpid(), *ranks))),
            start_ticks=0 if self._process is None else self._process.start_ticks,
            sent_at=time.time(),
            host=self._setup.host,
        )


def _resident_bytes(pid: int) -> int:
    """Return a process's memory, 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0
