"""tlt top: show a job's lanes and figures in the terminal, plain lines in a pipe."""

import asyncio
import contextlib
import os
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from cli.arguments import SessionName
from cli.output import console, say, timed_lines
from cli.top_screen import Screen, Shown
from tlt.base.id_types import JobId
from tlt.dashboard import page_sections
from tlt.dashboard.rollout_tail import RunningAnswers
from tlt.dashboard.run_fold import Run
from tlt.dashboard.session_feed import SessionFeed, SessionView
from tlt.errors import ConfigError, NoSession
from tlt.runs.run_folder_reader import follow_journal, open_ledger, read_spec
from tlt.session.client import run_folder, with_client
from tlt.session.session_files import is_up, load_session, session_folder
from tlt.spec.config import SessionSpec
from tlt.store.redis_connection import connect

_POLL_SECONDS = 1.0
_REDIS_SECONDS = 5.0


class SessionWatch(threading.Thread):
    """Poll in a thread, so that a slow Redis does not block the screen."""

    def __init__(self, spec: SessionSpec, job: JobId) -> None:
        super().__init__(daemon=True)
        self._spec = spec
        self._job = job
        self.view: SessionView | None = None
        self.running_answers: RunningAnswers | None = None
        self.followed = False

    def run(self) -> None:
        asyncio.run(self._poll(forever=True))

    def poll_once(self) -> None:
        asyncio.run(self._poll(forever=False))

    async def _poll(self, *, forever: bool) -> None:
        connection = connect(self._spec.redis_url, seconds=_REDIS_SECONDS)
        feed = SessionFeed(self._spec, connection)
        try:
            while True:
                self.view = await feed.view()
                self.running_answers = feed.running_answers(self._job)
                self.followed = feed.serves(self._job)
                if not forever:
                    return
                await asyncio.sleep(_POLL_SECONDS)
        finally:
            await connection.aclose()


def watch_session(folder: Path, session: str) -> SessionWatch | None:
    """Return None if the run does not belong to the session, or the session is down."""
    try:
        spec = load_session(session_folder(session))
    except NoSession:
        return None
    if not is_up(Path(spec.folder)) or folder.parent != Path(spec.runs):
        return None
    return SessionWatch(spec, JobId(folder.name))


_REDRAW_SECONDS = 0.5
_SLICE_SECONDS = 0.2
# unread bytes of a journal that count as caught up
FEW_BYTES = 1 << 16


def top(
    job: Annotated[
        str | None, typer.Argument(help="A job of the session, or the folder of a run.")
    ] = None,
    session: SessionName = "default",
    once: Annotated[bool, typer.Option("--once", help="Print one screen and exit.")] = False,
) -> None:
    """Show what each worker does, and the job's figures; `q` quits."""
    folder = run_folder(job or _newest(session), session)
    if not console.is_terminal and not once:
        _follow(folder)
        return
    run, watch = Run(folder, read_spec(folder)), watch_session(folder, session)
    if once:
        while run.catch_up(_SLICE_SECONDS):
            pass
        if watch is not None:
            watch.poll_once()
        console.print(render_screen(run, watch))
        return
    if watch is not None:
        watch.start()
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        reading = True
        while True:
            run.catch_up(_SLICE_SECONDS)
            run.discard_pending()
            reading = is_behind(run, reading)
            live.update(render_reading(run) if reading else render_screen(run, watch), refresh=True)
            if pressed(0.0 if reading else _REDRAW_SECONDS) in ("q", "Q", "\x03"):
                return


def _newest(session: str) -> str:
    """Return the last of the running jobs, or of all if none runs."""
    records = with_client(session, lambda client: client.jobs.all())
    if not records:
        raise ConfigError(f"session '{session}' has no job yet: `tlt submit` queues one")
    running = [record for record in records if record.status == "running"]
    return (running or records)[-1].job


def is_behind(run: Run, was: bool) -> bool:
    """Return True while much is unread; once True, it stays so until hardly anything is."""
    return run.unread > FEW_BYTES if was else run.has_large_backlog


def render_reading(run: Run) -> RenderableType:
    return Text(f"{run.folder.name}  reading the journal: {100 * run.share_read:.0f} %")


def render_screen(run: Run, watch: SessionWatch | None) -> RenderableType:
    followed = watch is not None and watch.followed
    running = watch.running_answers if watch is not None and followed else None
    now = page_sections.now(run, followed)
    tail = run.tail.view(run.ledger.state, (run.began or 0.0) + now, running)
    shown = Shown(
        head=page_sections.head(run, followed),
        now=now,
        tail=tail,
        sections=page_sections.sections(run, followed),
        session=None if watch is None else watch.view,
    )
    return Screen(run, console.width, console.height).render(shown)


def _follow(folder: Path) -> None:
    """Print log lines until the job ends."""
    ledger = open_ledger(folder)
    for entry in follow_journal(folder):
        if entry is not None:
            for line in timed_lines(ledger, entry):
                say(line)
            continue
        sys.stdout.flush()
        if ledger.ended:
            return


@contextlib.contextmanager
def _keys() -> Generator[Callable[[float], str]]:
    """Read single keys, without waiting for the end of a line."""
    descriptor = sys.stdin.fileno()
    if not os.isatty(descriptor):
        yield _sleep
        return
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield _pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _pressed(seconds: float) -> str:
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return os.read(sys.stdin.fileno(), 1).decode(errors="replace") if ready else ""


def _sleep(seconds: float) -> str:
    time.sleep(seconds)
    return ""
