"""Drive a live session as users do: by commands in processes of their own, and by its files."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import msgspec
import redis
import redis.exceptions
import yaml

from tests.in_process_cli import run_command
from tlt.protocol.events import RolloutDropped, RolloutFinished
from tlt.protocol.shared_values import Heartbeat, JobRecord
from tlt.report import Ledger, Snapshot
from tlt.runs.run_folder_reader import journal_entries, read_snapshot
from tlt.session.session_files import load_session
from tlt.store.job_requests import ENDED_STATUSES
from tlt.store.journal import JournalEntry
from tlt.store.redis_keys import Keys

TLT = [sys.executable, "-m", "cli.main"]
Result = subprocess.CompletedProcess[str]
# all but what starts processes: a process of their own would start for seconds
_LIGHT = frozenset(
    (
        *("submit", "retry", "jobs", "status", "logs", "ledger", "samples", "top", "eval"),
        *("pause", "resume", "cancel", "export", "config", "down"),
    )
)


class Live:
    def __init__(self, home: Path) -> None:
        self.home = home
        self.runs = home / "runs"
        self.environment = {**os.environ, "TLT_HOME": str(home / "tlt"), "COLUMNS": "200"}

    def tlt(self, *arguments: str, code: int = 0, seconds: float = 240.0) -> Result:
        if arguments[0] in _LIGHT:
            with patch.dict(os.environ, self.environment):
                result = Result(arguments, *run_command(*arguments))
        else:
            result = subprocess.run(
                [*TLT, *arguments],
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        assert result.returncode == code, f"{arguments}: {result.stdout}\n{result.stderr}"
        return result

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*TLT, *arguments],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # background jobs of a shell ignore SIGINT, and so would their children
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def json(self, *arguments: str) -> Any:
        return json.loads(self.tlt(*arguments, "--json").stdout)

    def submit(self, spec: Path, *changes: str, start: str | None = None) -> str:
        """Submit a job; `start` is what `--from` names."""
        options = [part for change in changes for part in ("--set", change)]
        options += [] if start is None else ["--from", start]
        return str(self.json("submit", str(spec), *options)["job"])

    def job(self, name: str) -> dict[str, Any]:
        return next(job for job in self.json("jobs") if job["job"] == name)

    def status(self, name: str) -> str | None:
        """Return what Redis has of a job, at none of the cost of a command; None if it is down."""
        with contextlib.suppress(redis.exceptions.ConnectionError), self._redis() as (raw, keys):
            record = cast("bytes", raw.hget(keys.jobs, name))
            return msgspec.json.decode(record, type=JobRecord).status
        return None

    def await_end(self, name: str, seconds: float = 240.0) -> dict[str, Any]:
        wait_until(lambda: self.status(name) in ENDED_STATUSES, f"{name} to end", seconds)
        return self.job(name)

    def journal(self, job: str) -> list[JournalEntry]:
        return list(journal_entries(self.runs / job))

    def fold(self, job: str) -> Snapshot:
        return read_snapshot(self.runs / job)

    def await_phase(self, job: str, phase: str, step: int = 0) -> None:
        def reached() -> bool:
            if not (self.runs / job / "journal.jsonl").exists():
                return False
            now = self.fold(job)
            return now.phase.value == phase and now.step >= step

        wait_until(reached, f"{job} to be {phase} at step {step}")

    def workers(self) -> dict[str, Heartbeat]:
        """Read heartbeats directly, because they would be out of date once a command started."""
        with self._redis() as (connection, keys):
            heartbeats = cast("dict[bytes, bytes]", connection.hgetall(keys.heartbeats))
        return {
            worker.decode(): msgspec.msgpack.decode(heartbeat, type=Heartbeat)
            for worker, heartbeat in sorted(heartbeats.items())
        }

    @contextlib.contextmanager
    def _redis(self) -> Generator[tuple[redis.Redis, Keys]]:
        session = load_session(self.home / "tlt" / "sessions" / "default")
        with redis.Redis.from_url(session.redis_url) as connection:
            yield connection, Keys(session.name)

    def await_workers(self, count: int, seconds: float = 240.0) -> None:
        wait_until(
            lambda: sum(bool(w.rank_pids) for w in self.workers().values()) == count,
            f"{count} workers with ranks",
            seconds,
        )


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 240.0) -> None:
    """Look twenty times a second, or half of the time where looking takes longer."""
    deadline = time.monotonic() + seconds
    while True:
        began = time.monotonic()
        if condition():
            return
        now = time.monotonic()
        assert now < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(max(0.05, now - began))


def counted_rollouts(journal: Sequence[JournalEntry], ledger: Ledger) -> list[tuple[int, int, int]]:
    """Return the counted rollouts, repeated as often as they were counted."""
    found: list[tuple[int, int, int]] = []
    for entry in journal:
        change = ledger.add(entry.event, entry.at)
        event = change.event
        if isinstance(event, RolloutFinished) and event.purpose == "train" and change.counts:
            found.append((event.step, event.prompt, event.member))
    return found


def count_dropped(journal: Sequence[JournalEntry]) -> int:
    return sum(isinstance(entry.event, RolloutDropped) for entry in journal)


def kill(pid: int, how: signal.Signals = signal.SIGKILL) -> None:
    os.kill(pid, how)


def pid_of(live: Live, service: str) -> int:
    log = live.home / "tlt" / "sessions" / "default" / "logs" / f"{service}.jsonl"
    started = [json.loads(line) for line in log.read_text().splitlines() if '"started"' in line]
    return int(started[-1]["pid"])


def redis_pid(live: Live) -> int:
    """Return the supervisor's child that listens on the session's socket."""
    ready = json.loads((live.home / "tlt" / "sessions" / "default" / "ready.json").read_text())
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            status = (process / "status").read_text()
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if f"PPid:\t{ready['pid']}\n" in status and b"redis-server" in command.split(b"\0")[0]:
            return int(process.name)
    raise AssertionError(f"no redis-server below {ready['pid']}, {os.getpid()}")


def write_spec(folder: Path, spec: dict[str, Any], name: str = "job.yaml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(spec))
    return path


def processes_of(session: Live) -> list[str]:
    """Return the commands of processes that have the session's folder in their environment."""
    found: list[str] = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                environment = (process / "environ").read_bytes()
                command = (process / "cmdline").read_bytes()
            except OSError:
                continue
            if str(session.home).encode() in environment and command:
                found.append(command.replace(b"\0", b" ").decode(errors="replace"))
    return found
