"""Supervise a session: Redis, Ray and the actors start with this process and end with it.

Run as `python -m tlt.actors.supervisor.session_supervisor FOLDER`; the lock allows only one.
"""

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import BinaryIO

import structlog

from tlt.actors.coordinator.deciders import SESSION
from tlt.actors.coordinator.redis_effects import Effects
from tlt.actors.supervisor.ray_head import RayHead
from tlt.actors.supervisor.ray_healer import (
    START_SECONDS,
    RayHealer,
    describe_missing,
    missing_actors,
)
from tlt.base.end_session_processes import identify
from tlt.base.json_logs import write_logs_to
from tlt.base.log_rotation import bound_logs
from tlt.errors import TltError
from tlt.session.fault_log import Fault, FaultLog
from tlt.session.leftovers import claim, remove_leftovers
from tlt.session.session_files import LOCK_FILE, Ready, load_session, short_folder, write_ready
from tlt.store.embedded_redis import EmbeddedRedis
from tlt.store.heartbeats import forget_heartbeats
from tlt.store.journal import check_schema, holds
from tlt.store.redis_connection import check, connect, hide_password
from tlt.store.redis_keys import Keys

_LOCK_SECONDS = 1.0
_POLL_SECONDS = 0.2
_LOGS_SECONDS = 5.0
_REDIS_PAUSE_SECONDS = 2.0
_log = structlog.get_logger("supervisor")


class Stop:
    """A wish to end, set by a signal's handler, which could find an Event's lock held."""

    def __init__(self) -> None:
        self.wished = False

    def __call__(self, *_: object) -> None:
        self.wished = True

    def wait(self, seconds: float) -> bool:
        time.sleep(seconds)
        return self.wished

    def check(self) -> None:
        """Raise TltError if it is set."""
        if self.wished:
            raise TltError("it was ended while it started")


class SessionSupervisor:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec = load_session(folder)
        self.short = short_folder(folder)
        self.redis: EmbeddedRedis | None = None
        self.head = RayHead(folder, self.short, in_cluster=self.spec.cluster is not None)
        self._faults = FaultLog(folder)
        # Redis' fault, and when it is next started, while its start fails
        self._redis_fault: Fault | None = None
        self._redis_due = 0.0
        # files whose locks end with this process
        self._locked: list[BinaryIO] = []
        self._claimed: list[Path] = []

    def start(self, stop: Stop) -> None:
        """Start all parts; raise TltError if it has to stop before they are up."""
        for place in (self.short, Path(self.spec.flight)):
            self._locked.append(claim(place, self.folder))
            self._claimed.append(place)
        for place in remove_leftovers(except_of=self.folder):
            _log.info("removed what a dead session has left", folder=str(place))
        if self.spec.redis_url.startswith("unix://") and self._owns_redis():
            self.redis = EmbeddedRedis(self.folder / "redis", self.short / "redis.sock")
            self.redis.start()
        stop.check()
        asyncio.run(self._check_redis())
        self._publish_processes()
        stop.check()
        self.head.start()
        self._await_actors(stop)
        self._publish_processes()
        write_ready(self.folder, Ready(pid=os.getpid(), error=None))

    def supervise(self, stop: Stop) -> None:
        """Restart the embedded Redis and Ray's head when they end; Ray restarts its actors."""
        healer = RayHealer(self.head, self.spec, self._faults)
        logs_due = 0.0
        while not stop.wait(_POLL_SECONDS):
            self.heal_redis()
            healer.check(time.monotonic())
            self._publish_processes()
            if time.monotonic() > logs_due:
                logs_due = time.monotonic() + _LOGS_SECONDS
                with contextlib.suppress(OSError):  # the disk may be full
                    for folder in ("logs", "redis"):
                        bound_logs(self.folder / folder)

    def stop(self) -> None:
        try:
            self.head.stop()
        except TltError as error:
            _log.error("something goes on", error=str(error))
        if self.redis is not None:
            self.redis.stop()
        for place in self._claimed:
            shutil.rmtree(place, ignore_errors=True)

    def take_lock(self) -> None:
        lock = open(self.folder / LOCK_FILE, "ab")  # noqa: SIM115
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                # `is_up` holds the lock for an instant.
                if time.monotonic() > deadline:
                    raise TltError(f"session '{self.spec.name}' is already up") from error
                time.sleep(0.01)
            else:
                with contextlib.suppress(OSError):  # the disk may be full
                    lock.truncate(0)
                    lock.write(b"%d" % os.getpid())
                    lock.flush()
                self._locked.append(lock)
                return

    def _owns_redis(self) -> bool:
        return self.spec.redis_url == f"unix://{self.short / 'redis.sock'}"

    async def _check_redis(self) -> None:
        connection = connect(self.spec.redis_url)
        try:
            await check(connection, self.spec.redis_url)
            committed = await Effects(connection, Keys(self.spec.name)).committed(SESSION)
            if not holds(self.folder / "session", committed):
                raise TltError(
                    f"the Redis at {hide_password(self.spec.redis_url)} holds another session "
                    f"'{self.spec.name}', whose journal isn't in {self.folder}; choose another name"
                )
            # those of an earlier session would count as actors of this one
            await forget_heartbeats(connection, Keys(self.spec.name))
        finally:
            await connection.aclose()

    def _await_actors(self, stop: Stop) -> None:
        deadline = time.monotonic() + START_SECONDS
        while missing := missing_actors(self.spec):
            if (ended := self.head.ended()) is not None:
                raise TltError(f"{ended} ended: {self.head.complaint()}")
            if time.monotonic() > deadline:
                raise TltError(f"{describe_missing(missing)}; see {self.folder / 'logs'}")
            stop.wait(_POLL_SECONDS)
            stop.check()

    def heal_redis(self) -> None:
        """Start Redis again, as often as it takes: its disk may be full."""
        if self.redis is None or self.redis.running or time.monotonic() < self._redis_due:
            return
        fault = self._redis_fault or self._faults.record_fault("Redis", time.time())
        fault = self._faults.record_retry(fault)
        with contextlib.suppress(OSError):
            self.redis.socket_path.unlink()
        try:
            self.redis.start()
        except (TltError, OSError) as error:
            self._redis_fault = self._faults.record_failure(fault, str(error))
            self._redis_due = time.monotonic() + _REDIS_PAUSE_SECONDS
        else:
            self._redis_fault = None
            self._faults.record_recovery(fault, time.time())

    def _publish_processes(self) -> None:
        pids = {"supervisor": os.getpid(), "Redis": self.redis.pid if self.redis else None}
        own = {name: identify(pid) for name, pid in pids.items() if pid is not None}
        known = {name: process for name, process in own.items() if process is not None}
        self._faults.watch(known | self.head.processes)


def main() -> None:
    folder = Path(sys.argv[1])
    write_logs_to(folder / "logs", "supervisor")
    stop = Stop()
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(name, stop)
    supervisor = SessionSupervisor(folder)
    try:
        supervisor.take_lock()
    except TltError as error:  # another one uses the folder, so change nothing in it
        raise SystemExit(f"tlt: {error}") from error
    try:
        check_schema(folder / "session")
    except TltError as error:  # the older version may go on with what lies in shared memory
        write_ready(folder, Ready(pid=os.getpid(), error=str(error)))
        raise SystemExit(1) from error
    try:
        supervisor.start(stop)
        supervisor.supervise(stop)
    except Exception as error:  # `tlt up` waits for the session and prints it
        _log.exception("the session cannot go on")
        complaint = str(error) if isinstance(error, TltError) else repr(error)
        write_ready(folder, Ready(pid=os.getpid(), error=complaint))
        raise SystemExit(1) from error
    finally:
        supervisor.stop()


if __name__ == "__main__":
    main()
