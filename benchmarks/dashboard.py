"""Measure the dashboard's cost under a thousand workers, and its listeners' delay.

    python -m benchmarks.dashboard --out benchmarks/results/dashboard.json

A session with its own Redis has a job of a thousand simulated workers: 200 events a second in the
journal, and heartbeats twice a second. The listeners are a page in Chromium, a fast reader, and one
that never reads; the last is there half of the time, so that the others can be compared with and
without it. Then a late listener receives the full state, and pages are opened. A second load has
two workers, one page and a job with a long journal.
"""

import argparse
import fcntl
import http.client
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import msgspec
import redis
from playwright.sync_api import Browser

from benchmarks.dashboard_browser import first_paint, lanes_drawn, open_page, received
from benchmarks.dashboard_world import World, big_spec
from benchmarks.result import Claim, write_result
from tests.browser.chromium import chromium
from tlt.base.id_types import Incarnation, JobId
from tlt.protocol.shared_values import Heartbeat, JobRecord
from tlt.session.session_files import write_session
from tlt.spec.config import JobSpec, SessionSpec
from tlt.store.embedded_redis import EmbeddedRedis
from tlt.store.redis_keys import Keys

_JOB = JobId("big-1")
_BATCH_SECONDS = 0.1
# entries per second of the demo's journal during a rollout
_DEMO_RATE = 30.0
# journal entries of a long job
_LONG = 40_000
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
# periods of the load, in turns without and with a listener that never reads
_PERIODS = 8
_PAINTS = 5
Details = dict[str, object]


class Listener(threading.Thread):
    """Reads events as a browser does, and records when each came."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self._address = address
        self.received: list[tuple[float, int]] = []
        self.full_state_seconds = 0.0
        self.bytes = 0
        self.over = False

    def run(self) -> None:
        began = time.monotonic()
        with _events(self._address) as lines:
            kind = ""
            for line in lines:
                self.bytes += len(line)
                if line.startswith(b"event: "):
                    kind = line[7:].strip().decode()
                elif line.startswith(b"data: ") and kind == "run":
                    self._receive(msgspec.json.decode(line[6:]), began)
                if self.over:
                    return

    def await_full_state(self) -> None:
        deadline = time.monotonic() + 30
        while not self.full_state_seconds and time.monotonic() < deadline:
            time.sleep(0.05)

    def _receive(self, update: dict[str, object], began: float) -> None:
        head = update.get("head")
        if isinstance(head, dict):
            if not self.full_state_seconds:
                self.full_state_seconds = time.monotonic() - began
            self.received.append((time.time(), int(head["entries"])))


@contextmanager
def _events(address: str) -> Generator[http.client.HTTPResponse]:
    port = urlsplit(address).port
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", f"/api/events?job={_JOB}")
    yield connection.getresponse()
    connection.close()


class HeartbeatWriter(threading.Thread):
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


def resource_usage(pid: int) -> tuple[float, int]:
    """Return a process's CPU seconds and resident bytes."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return (int(fields[11]) + int(fields[12])) / _TICKS, resident


def write_steadily(world: World, rate: float, seconds: float) -> list[float]:
    """Write entries at `rate`; return when each was written."""
    written: list[float] = [time.time()] * world.journal.position.entries
    began, count = time.monotonic(), 0
    while (passed := time.monotonic() - began) < seconds:
        due = int(rate * passed) - count
        if due:
            world.write(due)
            count += due
            written += [time.time()] * due
        time.sleep(_BATCH_SECONDS)
    return written


def lateness(
    reached: Sequence[tuple[float, int]], written: Sequence[float], since: int
) -> list[float]:
    """Return the delay of each entry from number `since` on."""
    late: list[float] = []
    known = since
    for at, entries in reached:
        late += [at - written[number] for number in range(known, min(entries, len(written)))]
        known = max(known, entries)
    return late


class Load:
    """A simulated session and job, and a dashboard that shows them."""

    def __init__(self, home: Path, workers: int, spec: JobSpec, entries: int = 1000) -> None:
        self._server = EmbeddedRedis(home / "redis", home / "redis.sock")
        self._server.start()
        run = home / "runs" / _JOB
        run.mkdir(parents=True)
        self.world = World(_JOB, run, workers, spec)
        record = JobRecord(
            job=_JOB,
            status="running",
            error=None,
            submitted=time.time(),
            folder=str(run),
            spec=spec,
        )
        jobs, raw = Keys("default").jobs, msgspec.json.encode(record)
        redis.Redis.from_url(self._server.url).hset(jobs, _JOB, raw)
        self._heartbeats = HeartbeatWriter(self._server.url, "default", workers)
        self._heartbeats.start()
        self._lock = _session(home, self._server.url, workers)
        while self.world.journal.position.entries < entries:
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
        """Return the dashboard's share of a core, and when each entry was written."""
        before, began = resource_usage(self.process.pid)[0], time.monotonic()
        written = write_steadily(self.world, rate, seconds)
        return (resource_usage(self.process.pid)[0] - before) / (time.monotonic() - began), written

    def end(self) -> None:
        self._heartbeats.over = True
        self.process.terminate()
        self.process.wait(20)
        self._server.stop()
        self._lock.close()


def _session(home: Path, url: str, workers: int) -> BinaryIO:
    """Make a session that seems to be up: write its file and hold its lock."""
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


class StalledListener:
    """A listener that never reads; its small buffers are full at once."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.connect(("127.0.0.1", urlsplit(address).port))
        self._socket.sendall(
            f"GET /api/events?job={_JOB} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
        )

    def __enter__(self) -> "StalledListener":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


class Period(msgspec.Struct, frozen=True, kw_only=True):
    """One period of the load."""

    sleeps: bool
    share: float
    since: int
    # times at which the entries up to its end were written
    written: list[float]

    def late(self, reached: Sequence[tuple[float, int]]) -> list[float]:
        return lateness(reached, self.written, self.since)


def measure_periods(load: Load, rate: float, seconds: float) -> list[Period]:
    """Run the load in turns with and without a listener that never reads."""
    found: list[Period] = []
    for number in range(_PERIODS):
        # the cost grows with the run, so the order is balanced
        sleeps = number % 4 in (1, 2)
        since = load.world.journal.position.entries
        with StalledListener(load.address) if sleeps else nullcontext():
            share, written = load.run(rate, seconds / _PERIODS)
        found.append(Period(sleeps=sleeps, share=share, since=since, written=written))
    return found


def measure_many_workers(
    home: Path, browser: Browser, workers: int, rate: float, seconds: float
) -> tuple[list[Claim], Details]:
    load = Load(home, workers, big_spec())
    listener = Listener(load.address)
    listener.start()
    page = open_page(browser, load.address, _JOB)
    time.sleep(2.0)
    run = measure_periods(load, rate, seconds)
    resident = resource_usage(load.process.pid)[1]
    time.sleep(2.0)  # lets the listeners receive the last entries
    received_by = {"chromium": received(page), "reader": listener.received}
    late_listener = Listener(load.address)
    late_listener.start()
    late_listener.await_full_state()
    paints, drawn = paint_often(browser, load.address)
    listener.over = late_listener.over = True
    load.end()
    late = {
        name: [at for part in run for at in part.late(updates)]
        for name, updates in received_by.items()
    }
    both = [at for some in late.values() for at in some]
    beside, alone = (
        [at for part in run if part.sleeps is sleeps for at in part.late(received_by["reader"])]
        for sleeps in (True, False)
    )
    shares = {s: fmean(part.share for part in run if part.sleeps is s) for s in (True, False)}
    claims = [
        _at_most("of a core, a thousand workers", 100 * shares[True], "%", 25.0),
        _at_most("resident", resident / 1e6, "MB", 200.0),
        _at_most("event at a listener, p95", quantile(both, 0.95), "s", 1.0),
        _at_most("event in Chromium, p95", quantile(late["chromium"], 0.95), "s", 1.0),
        _at_most("the whole, to who comes late", late_listener.full_state_seconds, "s", 1.0),
        _at_most("dashboard.first_paint, a thousand workers, worst", max(paints), "s", 1.0),
        _at_most(
            "later at the reader, p95, for one that sleeps",
            quantile(beside, 0.95) - quantile(alone, 0.95),
            "s",
            0.1,
        ),
        _at_most("of a core, for one that sleeps", 100 * (shares[True] - shares[False]), "%", 2.0),
    ]
    written = load.world.journal.position.entries - run[0].since
    return claims, {
        "workers": workers,
        "events_per_second": written / seconds,
        "listeners": "a page in Chromium, one that reads, one that sleeps half of the time",
        "chromium": browser.version,
        "p50_seconds": quantile(both, 0.5),
        "p99_seconds": quantile(both, 0.99),
        "p95_seconds_beside_a_sleeper": quantile(beside, 0.95),
        "p95_seconds_without": quantile(alone, 0.95),
        "shares_by_stretch": [part.share for part in run],
        "first_paint_seconds": paints,
        "lanes_drawn_seconds": drawn,
        "bytes_per_second_to_the_reader": listener.bytes / seconds,
        "entries": load.world.journal.position.entries,
    }


def paint_often(browser: Browser, address: str) -> tuple[list[float], list[float]]:
    """Return the times of first paints, and of lanes that were drawn."""
    paints: list[float] = []
    drawn: list[float] = []
    for _ in range(_PAINTS):
        page = open_page(browser, address, _JOB)
        drawn.append(lanes_drawn(page))
        paints.append(first_paint(page))
        page.context.close()
    return paints, drawn


def measure_few_workers(
    home: Path, browser: Browser, seconds: float
) -> tuple[list[Claim], Details]:
    """Measure two workers and one page, with hundreds of finished steps."""
    load = Load(home, 2, big_spec(prompts=8), _LONG)
    page = open_page(browser, load.address, _JOB)
    time.sleep(2.0)
    share, _ = load.run(_DEMO_RATE, seconds)
    page.context.close()
    load.end()
    return [_at_most("of a core, two workers and a page", 100 * share, "%", 1.0)], {
        "events_per_second": _DEMO_RATE,
        "entries_before": _LONG,
    }


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def _at_most(name: str, value: float, unit: str, bar: float) -> Claim:
    return Claim(name=name, value=value, unit=unit, bar=bar, less_is_better=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tlt-", dir="/tmp") as folder:
        with chromium() as browser:
            claims, details = measure_many_workers(
                Path(folder) / "many", browser, arguments.workers, arguments.rate, arguments.seconds
            )
        with chromium() as browser:
            more, few_details = measure_few_workers(
                Path(folder) / "few", browser, arguments.seconds
            )
    both = {"many": details, "few": few_details}
    write_result("dashboard", claims + more, both, time.monotonic() - began, arguments.out)


if __name__ == "__main__":
    main()
