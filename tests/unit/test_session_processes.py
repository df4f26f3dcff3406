"""Processes of a session are found by their environment, and no others are ended."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.live import wait_until
from tlt.base.end_session_processes import (
    end_processes,
    identify,
    is_child,
    is_running,
    mark,
    processes_of,
)

# starts a process in a session of its own, whose parent ends at once
_ORPHAN = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)"


@pytest.fixture
def started() -> Iterator[list["subprocess.Popen[bytes]"]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def start(folder: Path, *command: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(command, env=os.environ | mark(folder))


def test_ends_processes_and_orphans_of_one_session_only(
    tmp_path: Path, started: list["subprocess.Popen[bytes]"]
) -> None:
    ours, other = tmp_path / "ours", tmp_path / "ours-too"
    started += [start(ours, "sleep", "61"), start(other, "sleep", "62")]
    start(ours, sys.executable, "-c", _ORPHAN).wait()
    commands = sorted(processes_of(ours).values())
    assert commands == [b"sleep\x0060\x00", b"sleep\x0061\x00"]
    end_processes(ours)
    assert processes_of(ours) == {}
    assert identify(started[0].pid) is None
    assert processes_of(other) == {started[1].pid: b"sleep\x0062\x00"}


def test_spares_commands_with_an_argument(
    tmp_path: Path, started: list["subprocess.Popen[bytes]"]
) -> None:
    started += [start(tmp_path, "sleep", "61"), start(tmp_path, "sleep", "62")]
    end_processes(tmp_path, spared=[b"61"])
    assert list(processes_of(tmp_path)) == [started[0].pid]
    end_processes(tmp_path)
    assert processes_of(tmp_path) == {}


def test_a_zombie_has_ended_and_another_start_is_another_process() -> None:
    process = subprocess.Popen(["sleep", "60"])
    found = identify(process.pid)
    assert found is not None
    assert is_running(found)
    assert not is_running(type(found)(found.pid, found.start_ticks - 1))
    assert is_child(process.pid, os.getpid())
    process.kill()
    wait_until(lambda: not is_running(found), "the process to end")
    assert not is_child(process.pid, os.getpid())
    process.wait()
