"""`tlt top` works in terminals of several sizes and in a pipe."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from cli.top import is_behind, render_reading, render_screen, watch_session
from cli.top_screen import Screen, Shown
from tlt.base.id_types import JobId, Member, PromptIndex, WorkerId
from tlt.dashboard import page_sections
from tlt.dashboard.rollout_tail import RunningAnswer
from tlt.dashboard.run_fold import Run
from tlt.dashboard.session_feed import JobRow, SessionView
from tlt.dashboard.session_health import Health, StreamHealth
from tlt.dashboard.tail_forecast import Forecast
from tlt.dashboard.warnings_and_remedies import Advice, Urgency
from tlt.runs.run_folder_reader import read_spec
from tlt.session.session_files import write_session
from tlt.spec.config import SessionSpec

_TOP = [sys.executable, "-m", "cli.main", "top"]


class Terminal:
    def __init__(self, folder: Path, columns: int, lines: int) -> None:
        self._ours, theirs = pty.openpty()
        self.resize(columns, lines)
        environment = {**os.environ, "TERM": "xterm-256color"}
        environment.pop("COLUMNS", None)
        environment.pop("LINES", None)
        self.process = subprocess.Popen(
            [*_TOP, str(folder)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
        )
        os.close(theirs)
        os.set_blocking(self._ours, False)
        self.seen = ""

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, key: str) -> None:
        os.write(self._ours, key.encode())

    def await_text(self, text: str, after: int = 0) -> None:
        deadline = time.monotonic() + 30
        while text not in self.seen[after:]:
            assert time.monotonic() < deadline, f"waited for {text!r} in {self.seen[-2000:]!r}"
            try:
                self.seen += os.read(self._ours, 65536).decode(errors="replace")
            except BlockingIOError:
                time.sleep(0.02)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (60, 14), (200, 60)])
def test_shows_lanes_and_quits(run_folder: Path, columns: int, lines: int) -> None:
    terminal = Terminal(run_folder, columns, lines)
    try:
        terminal.await_text("w0")
        terminal.await_text("█")
        terminal.await_text("q quits")
        terminal.press("q")
        assert terminal.process.wait(20) == 0
    finally:
        terminal.close()


def test_follows_the_terminals_size(run_folder: Path) -> None:
    terminal = Terminal(run_folder, 120, 40)
    try:
        terminal.await_text("q quits")
        after = len(terminal.seen)
        terminal.resize(60, 14)
        terminal.await_text("q quits", after)
        terminal.await_text("q quits", len(terminal.seen))
        last = terminal.seen.rsplit("\x1b[H", 1)[-1]
        assert last.count("\n") < 14
        terminal.press("q")
        assert terminal.process.wait(20) == 0
    finally:
        terminal.close()


def test_prints_plain_lines_to_a_pipe(run_folder: Path) -> None:
    output = subprocess.run(
        [*_TOP, str(run_folder)], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert "\x1b" not in output
    assert output.rstrip().endswith("done")


def test_only_the_log_is_cut_off_at_80_by_24(run_folder: Path) -> None:
    run = Run(run_folder, read_spec(run_folder))
    while run.catch_up(1.0):
        pass
    answer = RunningAnswer(
        prompt=PromptIndex(100), member=Member(7), worker=WorkerId("w10"), seconds=4000, attempt=0
    )
    tail = run.tail.view(run.ledger.state, run.last_entry, None)
    tail = msgspec.structs.replace(
        tail,
        seconds=5000.0,
        longest=(answer,) * 8,
        running=64,
        forecast=Forecast(p50=4000.0, p90=8000.0),
    )
    head = page_sections.head(run, followed=True)
    streams = tuple(
        StreamHealth(
            name=name, group=group, depth=depth, pending=64, oldest_seconds=4000.0, job=job
        )
        for name, group, depth, job in (
            ("events", "coordinator", 1000, None),
            ("events", "reward", 1000, None),
            ("prompts", "rollout", 1000, head.job),
            ("prompts", "rollout", 2000, JobId("other-1")),
        )
    )
    health = Health(streams=streams, all_workers=16, running=64, redis_bytes=1 << 30)
    advice = Advice(Urgency.NOW, "Something is wrong. " * 3, "Do this. " * 5)
    view = SessionView(
        name="default",
        up=True,
        redis="",
        runs="",
        device="cpu",
        jobs=(running_job("other-1", "w1"), running_job(head.job, "w10")),
        older_jobs=0,
        health=health,
        advice=(advice,),
    )
    shown = Shown(
        head=head,
        now=5000.0,
        tail=tail,
        sections=page_sections.sections(run, followed=True),
        session=view,
    )
    console = Console(width=80, height=24, record=True, file=StringIO())
    console.print(Screen(run, 80, 24).render(shown))
    lines = console.export_text().splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    text = " ".join(line.strip() for line in lines)
    assert "…" not in text
    for part in ("100·7 1 h 06 min (w10)", "events (reward) 1000", "16 workers", "1 h 06 min to"):
        assert part in text
    assert "`tlt top other-1` (w1)" in text
    assert f"`tlt top {head.job}`" not in text
    assert "2000" not in text
    assert text.count("Do this.") == 5
    assert lines[-1].startswith("q quits")


def running_job(job: str, workers: str) -> JobRow:
    return JobRow(
        job=JobId(job),
        status="running",
        error=None,
        pause=None,
        wait=None,
        workers=workers,
        submitted=0.0,
        folder="",
        steps=2,
        attempts=1,
        losses=0,
    )


def test_shows_figures_once_the_journal_is_read(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tlt.dashboard.run_fold.LARGE_BACKLOG", 5000)
    monkeypatch.setattr("cli.top.FEW_BYTES", 0)
    run = Run(run_folder, read_spec(run_folder))
    assert run.has_large_backlog
    assert run.share_read == 0.0
    run.catch_up(0.0)
    assert run.has_large_backlog
    assert 0.0 < run.share_read < 1.0
    console = Console(width=80, file=StringIO(), record=True)
    assert is_behind(run, was=False)
    console.print(render_reading(run))
    assert "reading the journal" in console.export_text()
    while run.unread >= 5000:
        run.catch_up(0.0)
    assert run.unread
    assert is_behind(run, was=True)
    assert not is_behind(run, was=False)
    while run.catch_up(1.0):
        pass
    assert not is_behind(run, was=True)
    console.print(render_screen(run, None))
    assert "q quits" in console.export_text()


def test_asks_only_the_session_that_the_run_belongs_to(
    session: SessionSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TLT_HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / "sessions" / "default"
    folder.parent.mkdir(parents=True)
    folder.symlink_to(session.folder)
    assert watch_session(Path(session.runs) / "a-1", "default") is None  # never started
    write_session(session)
    assert watch_session(tmp_path / "elsewhere" / "a-1", "default") is None
    watch = watch_session(Path(session.runs) / "a-1", "default")
    assert watch is not None
    watch.poll_once()
    assert watch.followed
    assert watch.view is not None
    assert watch.view.health.error is None
