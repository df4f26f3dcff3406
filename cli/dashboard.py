"""tlt dashboard: the live page of a session, or of one run's folder."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from cli.output import complain, say
from cli.session_control import find_session
from tlt.child_process import die_with_parent
from tlt.session_files import session_folder

_FILE = "dashboard.json"
_START_SECONDS = 20.0
_STOP_SECONDS = 5.0


class Started(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    address: str


def dashboard(
    run: Annotated[
        Path | None, typer.Option("--run", help="A run's folder, with or without a session.")
    ] = None,
    session: Annotated[str, typer.Option("--session", help="Name of the session.")] = "default",
    host: Annotated[
        str, typer.Option(help="Where to listen; any other address needs a --token.")
    ] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help="8420, or a free one after it.")] = None,
    token: Annotated[
        str | None, typer.Option(envvar="TLT_DASHBOARD_TOKEN", help="The session's own otherwise.")
    ] = None,
    public_url: Annotated[
        str | None, typer.Option(help="Of a proxy before it; then nobody looks without the token.")
    ] = None,
) -> None:
    """Serve the page until Ctrl-C; jobs do not notice whether it is there."""
    # these take a moment that no other command has to spend
    from tlt.dashboard.access_guard import is_loopback
    from tlt.dashboard.data_sources import FolderSource, SessionSource, Source
    from tlt.dashboard.server import serve, session_token

    # whoever ends it, what it announced goes with it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

    def ready(address: str) -> None:
        say(f"dashboard  {address}")
        sys.stdout.flush()

    if run is not None:
        folder = run.resolve()

        def make_source() -> Source:
            return FolderSource(folder)

        serve(make_source, host=host, port=port, token=token, public=public_url, ready=ready)
        return
    spec = find_session(session)
    file = Path(spec.folder) / _FILE

    def announce(address: str) -> None:
        ready(address)
        if _running(session) is None:
            file.touch(mode=0o600)
            file.write_bytes(msgspec.json.encode(Started(pid=os.getpid(), address=address)))

    try:
        serve(
            lambda: SessionSource(spec),
            host=host,
            port=port,
            # another address takes a token that somebody chose
            token=token or (session_token(Path(spec.folder)) if is_loopback(host) else None),
            public=public_url,
            ready=announce,
        )
    finally:
        started = _running(session)
        if started is not None and started.pid == os.getpid():
            file.unlink(missing_ok=True)


def start_dashboard(session: str, *, ends_with_us: bool = False) -> str | None:
    """Beside a session that is up; its address, or None: a session is good without."""
    running = _running(session)
    if running is not None:
        return running.address
    logs = session_folder(session) / "logs"
    with open(logs / "dashboard.out", "ab") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "cli.main", "dashboard", "--session", session],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=die_with_parent(signal.SIGTERM) if ends_with_us else None,
        )
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and child.poll() is None:
        started = _running(session)
        if started is not None and started.pid == child.pid:
            return started.address
        time.sleep(0.05)
    complain(f"the dashboard did not start; see {logs / 'dashboard.out'}")
    return None


def stop_dashboard(session: str) -> None:
    running = _running(session)
    if running is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(running.pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    while _is_dashboard(running.pid) and time.monotonic() < deadline:
        time.sleep(0.02)


def _running(session: str) -> Started | None:
    try:
        raw = (session_folder(session) / _FILE).read_bytes()
        started = msgspec.json.decode(raw, type=Started)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    return started if _is_dashboard(started.pid) else None


def _is_dashboard(pid: int) -> bool:
    """The number may be another process's by now."""
    try:
        return b"\0dashboard\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
