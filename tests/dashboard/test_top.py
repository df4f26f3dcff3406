"""`tlt top` in a terminal of 80 by 24, in a smaller one, and in a pipe."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

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
def test_it_shows_lanes_and_quits(run_folder: Path, columns: int, lines: int) -> None:
    terminal = Terminal(run_folder, columns, lines)
    try:
        terminal.await_text("w0")
        terminal.await_text("█")
        terminal.await_text("q quits")
        terminal.press("q")
        assert terminal.process.wait(20) == 0
    finally:
        terminal.close()


def test_it_follows_the_terminals_size(run_folder: Path) -> None:
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


def test_a_pipe_gets_plain_lines(run_folder: Path) -> None:
    told = subprocess.run(
        [*_TOP, str(run_folder)], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert "\x1b" not in told
    assert told.rstrip().endswith("done")
