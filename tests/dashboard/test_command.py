"""`tlt dashboard` announces itself in the session's folder until it ends."""

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from cli.dashboard import RunningDashboard, stop_dashboard
from tlt.session.session_files import write_session
from tlt.spec.config import SessionSpec

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the folder of a session that is up: its lock is held."""
    folder = tmp_path / "sessions" / "default"
    write_session(
        SessionSpec(
            name="default",
            folder=str(folder),
            runs=str(tmp_path),
            flight="/flight",
            redis_url="unix:///nowhere/redis.sock",
        )
    )
    monkeypatch.setenv("TLT_HOME", str(tmp_path))
    with open(folder / "lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


@pytest.fixture
def start(home: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def begin(host: str = "127.0.0.1", output: list[str] | None = None) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "cli.main", "dashboard", "--host", host, "--port", "0"]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(child)
        assert child.stdout is not None
        line = child.stdout.readline()
        assert line.startswith(f"dashboard  http://{host}:")
        if output is not None:
            output.append(line.strip())
        return child

    yield begin
    for child in started:
        child.kill()
        child.communicate()


def test_first_dashboard_is_announced_and_ends_with_the_session(start: Start, home: Path) -> None:
    file = home / "dashboard.json"
    first, second = start(), start()
    assert msgspec.json.decode(file.read_bytes(), type=RunningDashboard).pid == first.pid
    os.kill(second.pid, signal.SIGTERM)
    assert second.wait(20) == 0
    assert msgspec.json.decode(file.read_bytes(), type=RunningDashboard).pid == first.pid
    stop_dashboard("default")
    assert first.wait(20) == 0
    assert not file.exists()


def test_uses_the_sessions_token_for_any_loopback_name(start: Start, home: Path) -> None:
    started: list[str] = []
    start("localhost", started)
    assert started[0].endswith(f"?token={(home / 'dashboard-token').read_text()}")
