"""What the dashboard costs under a thousand workers, and how late its listeners hear of an event.

    python -m benchmarks.dashboard --out benchmarks/results/dashboard.json

A session with its own Redis and a job of a thousand workers that are only written about: 200 events
a second in the journal, their heartbeats twice a second. Three listen: two as a browser does, one
that never reads. Then somebody comes late, and is told the whole.
"""

import argparse
import fcntl
import http.client
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import redis

from benchmarks.dashboard_world import World, big_spec
from benchmarks.result import Claim, write_result
from tlt.config import SessionSpec
from tlt.messages import Heartbeat, JobRecord
from tlt.session_files import write_session
from tlt.store.keys import Keys
from tlt.store.server import EmbeddedRedis
from tlt.types import Incarnation, JobId

_JOB = JobId("big-1")
_BATCH_SECONDS = 0.1
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Listener(threading.Thread):
    """Reads events as a browser does, and when each came."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self._address = address
        self.heard: list[tuple[float, int]] = []
        self.whole_seconds = 0.0
        self.bytes = 0
        self.over = False

    def run(self) -> None:
        begun = time.monotonic()
        with _events(self._address) as lines:
            kind = ""
            for line in lines:
                self.bytes += len(line)
                if line.startswith(b"event: "):
                    kind = line[7:].strip().decode()
                elif line.startswith(b"data: ") and kind == "run":
                    self._hear(msgspec.json.decode(line[6:]), begun)
                if self.over:
                    return

    def _hear(self, update: dict[str, object], begun: float) -> None:
        head = update.get("head")
        if isinstance(head, dict):
            if not self.whole_seconds:
                self.whole_seconds = time.monotonic() - begun
            self.heard.append((time.time(), int(head["entries"])))


@contextmanager
def _events(address: str) -> Generator[http.client.HTTPResponse]:
    port = urlsplit(address).port
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", f"/api/events?job={_JOB}")
    yield connection.getresponse()
    connection.close()


class Beats(threading.Thread):
    def __init__(self, url: str, session: str, workers: int) -> None:
        super().__init__(daemon=True)
        self._client = redis.Redis.from_url(url)
        self._key = Keys(session).heartbeats
        self._workers = workers
        self.over = False

    def run(self) -> None:
        counter = 0
        while not self.over:
            counter += 1
            beats: dict[Any, Any] = {
                f"w{number}": msgspec.msgpack.encode(
                    Heartbeat(
                        incarnation=Incarnation(number + 1),
                        counter=counter,
                        progress=counter,
                        running=16,
                        pid=os.getpid(),
                        rank_pids=(os.getpid(),),
                        job=_JOB,
                    )
                )
                for number in range(self._workers)
            }
            self._client.hset(self._key, mapping=beats)
            time.sleep(0.5)


@contextmanager
def session(home: Path, url: str, workers: int) -> Generator[SessionSpec]:
    folder = home / "sessions" / "default"
    spec = SessionSpec(
        name="default",
        folder=str(folder),
        runs=str(home / "runs"),
        flight=str(home / "flight"),
        redis_url=url,
        workers=workers,
    )
    write_session(spec)
    (folder / "logs").mkdir()
    with open(folder / "lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield spec


def used(pid: int) -> tuple[float, int]:
    """Seconds of its processor, and bytes that are resident."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return (int(fields[11]) + int(fields[12])) / _TICKS, resident


def write_steadily(world: World, rate: float, seconds: float) -> list[float]:
    """When each entry was written; the journal's own times are those of decisions."""
    written: list[float] = [time.time()] * world.journal.position.entries
    begun, count = time.monotonic(), 0
    while (passed := time.monotonic() - begun) < seconds:
        due = int(rate * passed) - count
        if due:
            world.write(due)
            count += due
            written += [time.time()] * due
        time.sleep(_BATCH_SECONDS)
    return written


def lateness(listener: Listener, written: list[float], since: int) -> list[float]:
    late: list[float] = []
    known = since
    for at, entries in listener.heard:
        late += [at - written[number] for number in range(known, min(entries, len(written)))]
        known = max(known, entries)
    return late


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tlt-", dir="/tmp") as folder:
        home = Path(folder)
        server = EmbeddedRedis(home / "redis", home / "redis.sock")
        server.start()
        with session(home, server.url, asked.workers) as spec:
            claims, details = measure(home, spec, asked.workers, asked.rate, asked.seconds)
        server.stop()
    write_result("dashboard", claims, details, time.monotonic() - begun, asked.out)


def measure(
    home: Path, spec: SessionSpec, workers: int, rate: float, seconds: float
) -> tuple[list[Claim], dict[str, object]]:
    run = home / "runs" / _JOB
    run.mkdir(parents=True)
    world = World(_JOB, run, workers)
    record = JobRecord(
        job=_JOB,
        status="running",
        error=None,
        submitted=time.time(),
        folder=str(run),
        spec=big_spec(),
    )
    redis.Redis.from_url(spec.redis_url).hset(
        Keys(spec.name).jobs, _JOB, msgspec.json.encode(record)
    )
    beats = Beats(spec.redis_url, spec.name, workers)
    beats.start()
    world.write(1000)
    process = subprocess.Popen(
        [sys.executable, "-m", "cli.main", "dashboard"],
        env={**os.environ, "TLT_HOME": str(home)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    address = process.stdout.readline().split()[-1]
    listeners = [Listener(address), Listener(address)]
    for listener in listeners:
        listener.start()
    since = world.journal.position.entries
    with _events(address):  # the sleeper: it never reads
        time.sleep(2.0)
        cpu_before, _ = used(process.pid)
        measured = time.monotonic()
        written = write_steadily(world, rate, seconds)
        cpu_after, resident = used(process.pid)
        share = (cpu_after - cpu_before) / (time.monotonic() - measured)
        late_comer = Listener(address)
        late_comer.start()
        time.sleep(3.0)
    for listener in (*listeners, late_comer):
        listener.over = True
    beats.over = True
    process.terminate()
    process.wait(20)
    late = sorted(ms for listener in listeners for ms in lateness(listener, written, since))
    p95 = late[int(0.95 * (len(late) - 1))]
    claims = [
        Claim(name="of a core", value=100 * share, unit="%", bar=25.0, less_is_better=True),
        Claim(name="resident", value=resident / 1e6, unit="MB", bar=200.0, less_is_better=True),
        Claim(name="event at a listener, p95", value=p95, unit="s", bar=1.0, less_is_better=True),
        Claim(
            name="the whole, to who comes late",
            value=late_comer.whole_seconds,
            unit="s",
            bar=1.0,
            less_is_better=True,
        ),
    ]
    details: dict[str, object] = {
        "workers": workers,
        "events_per_second": len(written[since:]) / seconds,
        "listeners": "two that read, one that sleeps",
        "p50_seconds": late[len(late) // 2],
        "p99_seconds": late[int(0.99 * (len(late) - 1))],
        "bytes_per_second_and_listener": listeners[0].bytes / seconds,
        "entries": world.journal.position.entries,
    }
    return claims, details


if __name__ == "__main__":
    main()
