"""Starting a session in the background, finding one, ending one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tlt.config import SessionSpec
from tlt.errors import ConfigError, NoSession, TltError
from tlt.session_files import (
    READY_FILE,
    is_up,
    load_session,
    read_ready,
    session_folder,
    write_session,
)

_START_SECONDS = 240.0
_STOP_SECONDS = 60.0


def find_session(name: str) -> SessionSpec:
    folder = session_folder(name)
    if not is_up(folder):
        raise NoSession(f"no session '{name}' is up: start one with `tlt up`")
    return load_session(folder)


def start_session(spec: SessionSpec) -> int:
    """Start the keeper in the background and wait until it is up; returns its process id."""
    folder = Path(spec.folder)
    if is_up(folder):
        raise ConfigError(f"session '{spec.name}' is already up; `tlt down` ends it")
    write_session(spec)
    (folder / READY_FILE).unlink(missing_ok=True)
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    with open(logs / "keeper.out", "ab") as output:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "tlt.actors.launch", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd="/",
        )
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        ready = read_ready(folder)
        if ready is not None and ready.pid == keeper.pid:
            if ready.error is not None:
                raise ConfigError(f"the session did not start: {ready.error}")
            return keeper.pid
        if keeper.poll() is not None:
            raise TltError(f"the session did not start; see {logs}")
        time.sleep(0.05)
    keeper.terminate()
    raise TltError(f"the session did not start within {_START_SECONDS:.0f} s; see {logs}")


def stop_session(name: str) -> None:
    folder = session_folder(name)
    ready = read_ready(folder)
    if not is_up(folder) or ready is None:
        raise NoSession(f"no session '{name}' is up")
    os.kill(ready.pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    while is_up(folder):
        if time.monotonic() > deadline:
            raise TltError(f"session '{name}' (process {ready.pid}) does not end")
        time.sleep(0.05)
