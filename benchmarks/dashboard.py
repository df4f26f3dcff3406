"""What the dashboard costs under a thousand workers, and how late its listeners hear of an event.

    python -m benchmarks.dashboard --out benchmarks/results/dashboard.json

A session with its own Redis and a job of a thousand workers that are only written about: 200 events
a second in the journal, their heartbeats twice a second. Three listen: a page in Chromium, one that
reads as fast as it is told, and one that never reads; the last comes and goes, so that the others
can be compared with and without it. Then somebody comes late and is told the whole, and pages are
opened. After that, two workers and one page, of a job with a long journal.
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

from benchmarks.dashboard_browser import first_paint, heard, lanes_drawn, open_page
from benchmarks.dashboard_world import World, big_spec
from benchmarks.result import Claim, write_result
from tests.browser.chromium import chromium
from tlt.config import JobSpec, SessionSpec
from tlt.ids import Incarnation, JobId
from tlt.protocol.records import Heartbeat, JobRecord
from tlt.session_files import write_session
from tlt.store.embedded_redis import EmbeddedRedis
from tlt.store.redis_keys import Keys

_JOB = JobId("big-1")
_BATCH_SECONDS = 0.1
# what the journal of the demo grows by while two workers roll out
_DEMO_RATE = 30.0
# entries of a job that has gone on for long
_LONG = 40_000
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
# of the load, by turns without and with one that sleeps
_STRETCHES = 8
_PAINTS = 5
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


def lateness(
    heard: Sequence[tuple[float, int]], written: Sequence[float], since: int
) -> list[float]:
    """Of each entry that was written from `since` on."""
    late: list[float] = []
    known = since
    for at, entries in heard:
        late += [at - written[number] for number in range(known, min(entries, len(written)))]
        known = max(known, entries)
    return late


class Load:
    """A session and a job that are only written about, and the dashboard that shows them."""

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
        self._beats = Beats(self._server.url, "default", workers)
        self._beats.start()
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


class Sleeper:
    """It asks for events and never reads; its buffers are full at once."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.connect(("127.0.0.1", urlsplit(address).port))
        self._socket.sendall(
            f"GET /api/events?job={_JOB} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
        )

    def __enter__(self) -> "Sleeper":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


class Stretch(msgspec.Struct, frozen=True, kw_only=True):
    """Some seconds of the load."""

    sleeps: bool
    share: float
    since: int
    # when each entry up to its end was written
    written: list[float]

    def late(self, heard: Sequence[tuple[float, int]]) -> list[float]:
        return lateness(heard, self.written, self.since)


def stretches(load: Load, rate: float, seconds: float) -> list[Stretch]:
    """With one that sleeps, and without, by turns."""
    found: list[Stretch] = []
    for number in range(_STRETCHES):
        # the cost grows with the run: neither kind comes later than the other on the whole
        sleeps = number % 4 in (1, 2)
        since = load.world.journal.position.entries
        with Sleeper(load.address) if sleeps else nullcontext():
            share, written = load.run(rate, seconds / _STRETCHES)
        found.append(Stretch(sleeps=sleeps, share=share, since=since, written=written))
    return found


def many(
    home: Path, browser: Browser, workers: int, rate: float, seconds: float
) -> tuple[list[Claim], Details]:
    load = Load(home, workers, big_spec())
    listener = Listener(load.address)
    listener.start()
    page = open_page(browser, load.address, _JOB)
    time.sleep(2.0)
    run = stretches(load, rate, seconds)
    resident = used(load.process.pid)[1]
    time.sleep(2.0)  # what was written last is told
    told = {"chromium": heard(page), "reader": listener.heard}
    late_comer = Listener(load.address)
    late_comer.start()
    late_comer.await_whole()
    paints, drawn = paint_often(browser, load.address)
    listener.over = late_comer.over = True
    load.end()
    late = {who: [at for part in run for at in part.late(said)] for who, said in told.items()}
    both = [at for some in late.values() for at in some]
    beside, alone = (
        [at for part in run if part.sleeps is sleeps for at in part.late(told["reader"])]
        for sleeps in (True, False)
    )
    shares = {s: fmean(part.share for part in run if part.sleeps is s) for s in (True, False)}
    claims = [
        _at_most("of a core, a thousand workers", 100 * shares[True], "%", 25.0),
        _at_most("resident", resident / 1e6, "MB", 200.0),
        _at_most("event at a listener, p95", quantile(both, 0.95), "s", 1.0),
        _at_most("event in Chromium, p95", quantile(late["chromium"], 0.95), "s", 1.0),
        _at_most("the whole, to who comes late", late_comer.whole_seconds, "s", 1.0),
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
    """First paints, and until when the lanes were drawn at the latest."""
    paints: list[float] = []
    drawn: list[float] = []
    for _ in range(_PAINTS):
        page = open_page(browser, address, _JOB)
        drawn.append(lanes_drawn(page))
        paints.append(first_paint(page))
        page.context.close()
    return paints, drawn


def few(home: Path, browser: Browser, seconds: float) -> tuple[list[Claim], Details]:
    """As the demo is followed: two workers, one page, and hundreds of steps that are over."""
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
    asked = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tlt-", dir="/tmp") as folder:
        with chromium() as browser:
            claims, details = many(
                Path(folder) / "many", browser, asked.workers, asked.rate, asked.seconds
            )
        with chromium() as browser:
            more, few_details = few(Path(folder) / "few", browser, asked.seconds)
    both = {"many": details, "few": few_details}
    write_result("dashboard", claims + more, both, time.monotonic() - begun, asked.out)


if __name__ == "__main__":
    main()
