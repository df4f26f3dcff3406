"""Find and end the processes that a session has started, whoever their parent is by now.

Ray's head is started with the session's folder in its environment, and all that it starts inherits
that. A process is signalled by a handle that was opened before its environment was read, so no
other process that got its number is hit.
"""

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from tlt.errors import TltError

_MARK = "TLT_PROCESS_OF"
_POLL_SECONDS = 0.02
_END_SECONDS = 20.0
_PROC = Path("/proc")
# places in /proc/PID/stat after the name
_STATE, _PARENT, _START = 0, 1, 19


class ProcessId(msgspec.Struct, frozen=True):
    """A process: its number, and its start in clock ticks since the machine started."""

    pid: int
    start_ticks: int


def mark(folder: Path) -> dict[str, str]:
    """Return what the environment of a session's processes holds."""
    return {_MARK: str(folder.resolve())}


def identify(pid: int) -> ProcessId | None:
    """Return None if there is no such process, or if it has ended and awaits its parent."""
    fields = _stat(pid)
    return None if fields is None else ProcessId(pid, int(fields[_START]))


def is_running(process: ProcessId) -> bool:
    return identify(process.pid) == process


def is_child(pid: int, parent: int) -> bool:
    """Return True if a process runs and was started by this parent."""
    fields = _stat(pid)
    return fields is not None and int(fields[_PARENT]) == parent


def children(parent: int) -> list[int]:
    """Return the processes that this one has started."""
    return [pid for pid in _pids() if is_child(pid, parent)]


def processes_of(folder: Path) -> dict[int, bytes]:
    """Return the command lines of a session's processes, by process id."""
    found: dict[int, bytes] = {}
    for pid in _pids():
        with contextlib.suppress(OSError):
            if _is_marked(pid, folder):
                found[pid] = (_PROC / str(pid) / "cmdline").read_bytes()
    return found


def end_processes(folder: Path, *, spared: Collection[bytes] = ()) -> None:
    """Kill a session's processes, those that they start meanwhile too, and wait for their end.

    Those with one of the spared arguments on their command line are left.
    """
    deadline = time.monotonic() + _END_SECONDS
    seen = True
    while True:
        left = [
            pid
            for pid, command in processes_of(folder).items()
            if not any(argument in spared for argument in command.split(b"\0"))
        ]
        if not left and not seen:
            return
        # one that is being started carries no mark for some milliseconds, so look twice
        seen = bool(left)
        if left and time.monotonic() > deadline:
            raise TltError(f"processes of the session do not end: {', '.join(map(str, left))}")
        for pid in left:
            _kill(pid, folder)
        time.sleep(_POLL_SECONDS)


def await_end(folder: Path, seconds: float) -> None:
    """Wait until none of a session's processes is left, at most so long."""
    deadline = time.monotonic() + seconds
    while processes_of(folder) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _kill(pid: int, folder: Path) -> None:
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            if _is_marked(pid, folder):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def _is_marked(pid: int, folder: Path) -> bool:
    environment = (_PROC / str(pid) / "environ").read_bytes()
    return f"{_MARK}={folder.resolve()}".encode() in environment.split(b"\0")


def _stat(pid: int) -> list[str] | None:
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # the name before the last parenthesis may hold anything
    fields = stat.rpartition(")")[2].split()
    return None if fields[_STATE] in "ZX" else fields


def _pids() -> Iterator[int]:
    own = os.getpid()
    for entry in os.listdir(_PROC):
        if entry.isdigit() and int(entry) != own:
            yield int(entry)
