"""tlt dashboard: serve the live page of a session, or of one run's folder."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from cli.arguments import SessionName
from cli.output import complain, say
from tlt.session.control import find_session, start_in_background
from tlt.session.session_files import session_folder

_FILE = "dashboard.json"
_START_SECONDS = 20.0
_STOP_SECONDS = 5.0


class RunningDashboard(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    address: str


def dashboard(
    run: Annotated[
        Path | None, typer.Option("--run", help="Show the run in this folder, without a session.")
    ] = None,
    session: SessionName = "default",
    host: Annotated[
        str, typer.Option(help="Address to listen on; one that is not local needs --token.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(help="Port; by default 8420 or the next free one.")
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(envvar="TLT_DASHBOARD_TOKEN", help="Access token; by default the session's."),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Don't print the address, which holds the token.")
    ] = False,
    public_url: Annotated[
        str | None,
        typer.Option(help="URL of a proxy in front; every visitor then needs the token."),
    ] = None,
) -> None:
    """Serve the live page until Ctrl-C; jobs run the same without it."""
    # imported here because they would slow down all other commands
    from tlt.dashboard.access_guard import is_loopback
    from tlt.dashboard.data_sources import FolderSource, SessionSource, Source
    from tlt.dashboard.server import serve, session_token

    # unwind on SIGTERM, so that the announcement is removed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

    def ready(address: str) -> None:
        if quiet:
            return
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
            file.write_bytes(
                msgspec.json.encode(RunningDashboard(pid=os.getpid(), address=address))
            )

    try:
        serve(
            lambda: SessionSource(spec),
            host=host,
            port=port,
            # an address that is not local needs a token that was chosen by the user
            token=token or (session_token(Path(spec.folder)) if is_loopback(host) else None),
            public=public_url,
            ready=announce,
        )
    finally:
        started = _running(session)
        if started is not None and started.pid == os.getpid():
            file.unlink(missing_ok=True)


def start_dashboard(session: str, *, ends_with_us: bool = False) -> str | None:
    """Start the page of a session in the background; return its address, or None if that failed."""
    running = _running(session)
    if running is not None:
        return running.address
    output = session_folder(session) / "logs" / "dashboard.out"
    child = start_in_background(
        ("cli.main", "dashboard", "--quiet", "--session", session),
        output,
        ends_with_us=ends_with_us,
    )
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and child.poll() is None:
        started = _running(session)
        if started is not None and started.pid == child.pid:
            return started.address
        time.sleep(0.05)
    complain(f"the dashboard did not start; see {output}")
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


def _running(session: str) -> RunningDashboard | None:
    try:
        raw = (session_folder(session) / _FILE).read_bytes()
        started = msgspec.json.decode(raw, type=RunningDashboard)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    return started if _is_dashboard(started.pid) else None


def _is_dashboard(pid: int) -> bool:
    """Check the command line: the number may belong to another process by now."""
    try:
        return b"\0dashboard\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
