"""What the dashboard costs under a thousand workers, and how late its listeners hear of an event.

    python -m benchmarks.dashboard --out benchmarks/results/dashboard.json

A session with its own Redis and a job of a thousand workers that are only written about: 200 events
a second in the journal, their heartbeats twice a second. Three listen: two as a browser does, one
that never reads. Then somebody comes late, and is told the whole. After that, two workers and one
page.
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
from typing import Any, BinaryIO
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
# what the journal of the demo grows by while two workers roll out
_DEMO_RATE = 30.0
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
Details = dict[str, object]


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

    def await_whole(self) -> None:
        deadline = time.monotonic() + 30
        while not self.whole_seconds and time.monotonic() < deadline:
            time.sleep(0.05)

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


class Load:
    """A session and a job that are only written about, and the dashboard that shows them."""

    def __init__(self, home: Path, workers: int) -> None:
        self._server = EmbeddedRedis(home / "redis", home / "redis.sock")
        self._server.start()
        run = home / "runs" / _JOB
        run.mkdir(parents=True)
        self.world = World(_JOB, run, workers)
        record = JobRecord(
            job=_JOB,
            status="running",
            error=None,
            submitted=time.time(),
            folder=str(run),
            spec=big_spec(),
        )
        jobs, raw = Keys("default").jobs, msgspec.json.encode(record)
        redis.Redis.from_url(self._server.url).hset(jobs, _JOB, raw)
        self._beats = Beats(self._server.url, "default", workers)
        self._beats.start()
        self._lock = _session(home, self._server.url, workers)
        self.world.write(1000)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cli.main", "dashboard"],
            env={**os.environ, "TLT_HOME": str(home)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().split()[-1]

    def run(self, rate: float, seconds: float) -> tuple[float, list[float]]:
        """The share of a core that it took, and when each entry was written."""
        before, begun = used(self.process.pid)[0], time.monotonic()
        written = write_steadily(self.world, rate, seconds)
        return (used(self.process.pid)[0] - before) / (time.monotonic() - begun), written

    def end(self) -> None:
        self._beats.over = True
        self.process.terminate()
        self.process.wait(20)
        self._server.stop()
        self._lock.close()


def _session(home: Path, url: str, workers: int) -> BinaryIO:
    """What makes it look up: its file, and the lock that its keeper holds."""
    folder = home / "sessions" / "default"
    write_session(
        SessionSpec(
            name="default",
            folder=str(folder),
            runs=str(home / "runs"),
            flight=str(home / "flight"),
            redis_url=url,
            workers=workers,
        )
    )
    lock = open(folder / "lock", "ab")  # noqa: SIM115
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def many(home: Path, workers: int, rate: float, seconds: float) -> tuple[list[Claim], Details]:
    load = Load(home, workers)
    listeners = [Listener(load.address), Listener(load.address)]
    for listener in listeners:
        listener.start()
    since = load.world.journal.position.entries
    with _events(load.address):  # the sleeper: it never reads
        time.sleep(2.0)
        share, written = load.run(rate, seconds)
        resident = used(load.process.pid)[1]
        late_comer = Listener(load.address)
        late_comer.start()
        late_comer.await_whole()
    for listener in (*listeners, late_comer):
        listener.over = True
    load.end()
    late = sorted(at for listener in listeners for at in lateness(listener, written, since))
    p50, p95, p99 = (late[int(share * (len(late) - 1))] for share in (0.5, 0.95, 0.99))
    claims = [
        _at_most("of a core, a thousand workers", 100 * share, "%", 25.0),
        _at_most("resident", resident / 1e6, "MB", 200.0),
        _at_most("event at a listener, p95", p95, "s", 1.0),
        _at_most("the whole, to who comes late", late_comer.whole_seconds, "s", 1.0),
    ]
    return claims, {
        "workers": workers,
        "events_per_second": len(written[since:]) / seconds,
        "listeners": "two that read, one that sleeps",
        "p50_seconds": p50,
        "p99_seconds": p99,
        "bytes_per_second_and_listener": listeners[0].bytes / seconds,
        "entries": load.world.journal.position.entries,
    }


def few(home: Path, seconds: float) -> tuple[list[Claim], Details]:
    """As the demo is followed: two workers, one page."""
    load = Load(home, 2)
    listener = Listener(load.address)
    listener.start()
    listener.await_whole()
    share, _ = load.run(_DEMO_RATE, seconds)
    listener.over = True
    load.end()
    return [_at_most("of a core, two workers and a page", 100 * share, "%", 1.0)], {
        "events_per_second": _DEMO_RATE
    }


def _at_most(name: str, value: float, unit: str, bar: float) -> Claim:
    return Claim(name=name, value=value, unit=unit, bar=bar, less_is_better=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tlt-", dir="/tmp") as folder:
        claims, details = many(Path(folder) / "many", asked.workers, asked.rate, asked.seconds)
        more, few_details = few(Path(folder) / "few", asked.seconds)
    both = {"many": details, "few": few_details}
    write_result("dashboard", claims + more, both, time.monotonic() - begun, asked.out)


if __name__ == "__main__":
    main()
