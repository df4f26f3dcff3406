"""Start a session in the background, find one, end one."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tlt.base.child_process import die_with_parent
from tlt.blobs.blob_url_store import open_store
from tlt.errors import ConfigError, NoSession, TltError
from tlt.session.cluster_plan import ClusterOptions, ask_cluster
from tlt.session.leftovers import remove_dead_session
from tlt.session.session_files import (
    READY_FILE,
    blobs_in_flight,
    is_up,
    load_session,
    read_ready,
    read_supervisor,
    session_folder,
    short_folder,
    write_session,
)
from tlt.spec.config import SessionSpec
from tlt.store.redis_connection import hide_password

_SUPERVISOR = "tlt.actors.supervisor.session_supervisor"
_START_SECONDS = 240.0
_STOP_SECONDS = 60.0


def find_session(name: str) -> SessionSpec:
    folder = session_folder(name)
    if not is_up(folder):
        raise NoSession(f"no session '{name}' is up: start one with `tlt up`")
    return load_session(folder)


def new_session(
    name: str,
    *,
    cluster: ClusterOptions | None = None,
    workers: int | None,
    ranks: int,
    redis_url: str | None,
    runs: Path,
    blobs: str | None = None,
    device: str,
    lease_seconds: float,
    reward_workers: int = 8,
) -> SessionSpec:
    folder = session_folder(name)
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device {device}: cpu or cuda")
    if redis_url is not None and not redis_url.startswith(("redis://", "rediss://", "unix://")):
        shown = hide_password(redis_url)
        raise ConfigError(f"--redis-url {shown}: write redis://, rediss:// or unix://")
    runs = runs.expanduser().resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        runs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=runs):
            pass
    except OSError as error:
        raise ConfigError(f"{error.filename or runs}: {error.strerror}") from error
    short = short_folder(folder)
    store = None if blobs is None else open_store(blobs)
    joined = None
    if cluster is not None:
        if redis_url is None or redis_url.startswith("unix://"):
            raise ConfigError(
                "--ray needs --redis-url: a Redis that all hosts reach, with TLS and a password"
            )
        joined = ask_cluster(
            cluster,
            ranks=ranks,
            device="cuda" if device == "cuda" else "cpu",
            redis_url=redis_url,
            folder=folder,
            runs=runs,
            store=store,
        )
        workers = joined.hosts * joined.workers_per_host
    return SessionSpec(
        name=name,
        folder=str(folder),
        runs=str(runs),
        blobs=None if store is None else store.url,
        flight=str(blobs_in_flight(short)),
        redis_url=redis_url or f"unix://{short / 'redis.sock'}",
        workers=workers or max(1, len(os.sched_getaffinity(0)) // ranks),
        ranks_per_worker=ranks,
        device="cuda" if device == "cuda" else "cpu",
        lease_seconds=lease_seconds,
        reward_workers=reward_workers,
        cluster=joined,
    )


def forget_session(spec: SessionSpec) -> None:
    """Remove the session's jobs and its Redis data; runs stay."""
    folder = Path(spec.folder)
    if is_up(folder):
        raise _already_up(spec.name)
    for part in ("redis", "session", "logs"):
        shutil.rmtree(folder / part, ignore_errors=True)


def start_session(spec: SessionSpec, *, ends_with_us: bool = False) -> int:
    """Start the supervisor in the background, wait until it is up, and return its process id."""
    folder = Path(spec.folder)
    if is_up(folder):
        raise _already_up(spec.name)
    logs = folder / "logs"
    try:
        write_session(spec)
        (folder / READY_FILE).unlink(missing_ok=True)
        logs.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from error
    supervisor = start_in_background(
        (_SUPERVISOR, str(folder)),
        logs / "supervisor.out",
        ends_with_us=ends_with_us,
        cwd="/",
    )
    try:
        _await_ready(supervisor, spec)
    except BaseException:  # Ctrl-C, too
        supervisor.terminate()
        try:
            supervisor.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            supervisor.kill()
        raise
    return supervisor.pid


def _await_ready(supervisor: subprocess.Popen[bytes], spec: SessionSpec) -> None:
    folder = Path(spec.folder)
    logs = folder / "logs"
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        ended = supervisor.poll() is not None
        ready = read_ready(folder)
        if ready is not None and ready.pid == supervisor.pid:
            if ready.error is not None:
                raise ConfigError(f"the session did not start: {ready.error}")
            return
        if ended and is_up(folder):
            raise _already_up(spec.name)
        if ended:
            raise TltError(f"the session did not start; see {logs}")
        time.sleep(0.05)
    raise TltError(f"the session did not start within {_START_SECONDS:.0f} s; see {logs}")


def session_option(name: str) -> str:
    """Return the option that a command for this session needs."""
    return "" if name == "default" else f" --session {name}"


def _already_up(name: str) -> ConfigError:
    return ConfigError(f"session '{name}' is already up; `tlt down{session_option(name)}` ends it")


def start_in_background(
    module: Sequence[str], output: Path, *, ends_with_us: bool, cwd: str | None = None
) -> subprocess.Popen[bytes]:
    """Start a Python module with its arguments, in a session of its own; append to `output`."""
    with open(output, "ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", *module],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=die_with_parent(signal.SIGTERM) if ends_with_us else None,
            cwd=cwd,
        )


def stop_session(name: str) -> bool:
    """End a session; return False if it was dead already and what it had left is removed."""
    folder = session_folder(name)
    if remove_dead_session(folder, short_folder(folder)):
        return False
    pid = read_supervisor(folder) if is_up(folder) else None
    if pid is None or not _runs(pid):
        raise NoSession(f"no session '{name}' is up")
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    while is_up(folder) or _runs(pid):
        if time.monotonic() > deadline:
            raise TltError(f"session '{name}' (process {pid}) does not end")
        time.sleep(0.05)
    return True


def _runs(pid: int) -> bool:
    """Return False for a zombie too, whose command line is empty, and for another program."""
    try:
        return _SUPERVISOR.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
