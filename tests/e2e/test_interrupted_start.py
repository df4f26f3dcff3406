"""A session that is ended while it starts leaves nothing."""

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.live import Live, processes_of, wait_until
from tlt.session.session_files import blobs_in_flight, is_up, read_ready, short_folder

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


@pytest.fixture
def starting(tmp_path: Path) -> Iterator[tuple[Live, "subprocess.Popen[str]"]]:
    """Return a session whose supervisor has begun, and the command that waits for it."""
    live = Live(tmp_path)
    command = live.start("up", "--workers", "1", "--runs", str(live.runs))
    wait_until(lambda: short_folder(folder_of(live)).exists(), "the supervisor")
    yield live, command
    if command.poll() is None:
        command.kill()
        live.tlt("down")


def folder_of(live: Live) -> Path:
    return live.home / "tlt" / "sessions" / "default"


def assert_nothing_left(live: Live) -> None:
    folder = folder_of(live)
    assert not is_up(folder)
    assert read_ready(folder) is not None
    assert [
        p for p in (short_folder(folder), blobs_in_flight(short_folder(folder))) if p.exists()
    ] == []
    wait_until(lambda: processes_of(live) == [], "the end of its processes", 20)


def test_ctrl_c_ends_a_session_that_starts(
    starting: tuple[Live, "subprocess.Popen[str]"],
) -> None:
    live, command = starting
    command.send_signal(signal.SIGINT)
    command.communicate(timeout=60)
    assert command.returncode == 130
    assert_nothing_left(live)


def test_down_ends_a_session_that_starts(starting: tuple[Live, "subprocess.Popen[str]"]) -> None:
    live, command = starting
    assert "session 'default' is down" in live.tlt("down").stdout
    _, complaint = command.communicate(timeout=60)
    assert command.returncode == 2
    assert "the session did not start: it was ended" in complaint
    assert_nothing_left(live)
