"""A session that faults may harm: a home, a small disk, small shared memory and a clock of its own.

Its folder, its runs and its blobs in flight lie on file systems in memory, if this user may mount
some.
"""

import contextlib
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import msgspec
import redis

from tests.e2e.live import Live
from tlt.base.id_types import JobId, WorkerId
from tlt.protocol.shared_values import Heartbeat, JobRecord, ServiceHeartbeat
from tlt.session.fault_log import Supervised, read_supervised
from tlt.session.session_files import blobs_in_flight, is_up, load_session, short_folder
from tlt.session.session_process_states import Liveness, actor_liveness, supervised_liveness
from tlt.spec.config import SessionSpec
from tlt.store.job_requests import ENDED_STATUSES
from tlt.store.journal import START, Position
from tlt.store.redis_keys import Keys

WORKERS = 2
_CLOCK = Path(__file__).parent / "clock"
_SESSION_MEGABYTES, _DISK_MEGABYTES, _MEMORY_MEGABYTES = 256, 256, 128
_REPLY_SECONDS = 30.0
_POLL_SECONDS = 0.05


class NotRecovered(Exception):
    """The session didn't get back to work within its bound."""


class Session:
    def __init__(self, root: Path, lease_seconds: float = 4.0) -> None:
        self.lease_seconds = lease_seconds
        self.live = Live(root)
        self.folder = root / "tlt" / "sessions" / "default"
        self.keys = Keys("default")
        self.mounts: list[Path] = []
        self._clock = root / "clock"
        self._clock.write_bytes(struct.pack("d", 0.0))
        path = [str(_CLOCK), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.live.environment |= {
            "PYTHONPATH": os.pathsep.join(path),
            "TLT_CHAOS_CLOCK": str(self._clock),
        }

    @property
    def spec(self) -> SessionSpec:
        return load_session(self.folder)

    @cached_property
    def redis(self) -> Any:
        """A client of the session's Redis, whose replies the checker can't type."""
        return redis.Redis.from_url(self.spec.redis_url, socket_timeout=_REPLY_SECONDS)

    def up(self) -> None:
        self.live.tlt(
            *("up", "--workers", str(WORKERS), "--runs", str(self.live.runs)),
            *("--lease-seconds", str(self.lease_seconds)),
            seconds=240,
        )

    # --- its clock

    @property
    def clock_offset(self) -> float:
        return struct.unpack("d", self._clock.read_bytes())[0]

    def move_clock(self, seconds: float) -> None:
        with open(self._clock, "r+b") as file:
            file.write(struct.pack("d", self.clock_offset + seconds))

    # --- its processes

    def workers(self) -> dict[WorkerId, Heartbeat]:
        raw = cast("dict[bytes, bytes]", self.redis.hgetall(self.keys.heartbeats))
        return {
            WorkerId(worker.decode()): msgspec.msgpack.decode(beat, type=Heartbeat)
            for worker, beat in sorted(raw.items())
        }

    def services(self) -> dict[str, ServiceHeartbeat]:
        raw = cast("dict[bytes, bytes]", self.redis.hgetall(self.keys.services))
        return {
            service.decode(): msgspec.msgpack.decode(beat, type=ServiceHeartbeat)
            for service, beat in raw.items()
        }

    def supervised(self) -> Supervised:
        return read_supervised(self.folder)

    def named(self, argument: str) -> list[int]:
        """Return the processes that have an argument on their command line, the dashboard too."""
        own = f"TLT_CHAOS_CLOCK={self._clock}".encode()
        found: list[int] = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (process / "cmdline").read_bytes().split(b"\0")
                environment = (process / "environ").read_bytes().split(b"\0")
                if argument.encode() in command and own in environment:
                    found.append(int(process.name))
        return sorted(found)

    def all_up(self) -> bool:
        """Return True if each process that the session should have runs and beats."""
        if not is_up(self.folder):
            return False
        now = time.time() + self.clock_offset
        supervised = self.supervised()
        found: list[Liveness] = [*supervised_liveness(supervised)]
        found += actor_liveness(self.spec, self.services(), self.workers(), supervised, now)
        return not supervised.healing and all(process.state == "up" for process in found)

    # --- its jobs

    def record(self, job: str) -> JobRecord:
        raw = cast("bytes", self.redis.hget(self.keys.jobs, job))
        return msgspec.json.decode(raw, type=JobRecord)

    def ended(self, job: str) -> bool:
        return self.record(job).status in ENDED_STATUSES

    def committed(self, job: str) -> Position:
        """Return how far a job's journal counts."""
        raw = cast("bytes | None", self.redis.hget(self.keys.committed, job))
        return START if raw is None else msgspec.json.decode(raw, type=Position)

    def run(self, job: str) -> Path:
        return self.live.runs / job

    def flight(self, job: str) -> Path:
        return self.spec.job_flight(JobId(job))


@contextmanager
def session(root: Path) -> Iterator[Session]:
    """Start a session, and end it with all that it has left."""
    own = Session(root)
    flight = blobs_in_flight(short_folder(own.folder))
    places = {
        own.folder: _SESSION_MEGABYTES,
        own.live.runs: _DISK_MEGABYTES,
        flight: _MEMORY_MEGABYTES,
    }
    for folder, megabytes in places.items():
        folder.mkdir(parents=True, mode=0o700)
        if _mount(folder, megabytes):
            own.mounts.append(folder)
    try:
        own.up()
        yield own
    finally:
        with contextlib.suppress(AssertionError):
            own.live.tlt("down")
        own.redis.close()
        for folder in own.mounts:
            subprocess.run(["umount", "--lazy", str(folder)], check=False)
        shutil.rmtree(flight, ignore_errors=True)


def until(condition: Callable[[], object], what: str, seconds: float = 120.0) -> None:
    """Wait for a condition; a Redis that doesn't answer makes it false."""
    deadline = time.monotonic() + seconds
    while not _holds(condition):
        if time.monotonic() > deadline:
            raise NotRecovered(f"waited {seconds:.0f} s for {what}")
        time.sleep(_POLL_SECONDS)


def _holds(condition: Callable[[], object]) -> bool:
    with contextlib.suppress(redis.exceptions.RedisError, OSError):
        return bool(condition())
    return False


def _mount(folder: Path, megabytes: int) -> bool:
    options: Sequence[str] = ("-t", "tmpfs", "-o", f"size={megabytes}m,mode=700", "tlt-chaos")
    try:
        mounted = subprocess.run(["mount", *options, str(folder)], capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return mounted.returncode == 0
