"""`tlt top` fits a real terminal (tmux) before and after it is resized."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools import require_tools
from tests.waiting import wait_until


class Tmux:
    """A tmux server of its own, without the user's configuration."""

    def __init__(self, socket: Path) -> None:
        self._tmux = ["tmux", "-u", "-f", "/dev/null", "-S", str(socket)]

    def start(self, columns: int, lines: int, *command: str) -> None:
        size = "-x", str(columns), "-y", str(lines)
        # these would override the size of the terminal
        free = "env", "-u", "COLUMNS", "-u", "LINES"
        self("new-session", "-d", *size, *free, *command)
        self("set", "-g", "remain-on-exit", "on")

    def __call__(self, *arguments: str) -> str:
        return subprocess.run(
            [*self._tmux, *arguments], capture_output=True, text=True, timeout=20, check=True
        ).stdout

    def screen(self) -> list[str]:
        return self("capture-pane", "-p").splitlines()

    def end(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], capture_output=True, check=False)


@pytest.fixture
def tmux(short_folder: Path) -> Iterator[Tmux]:
    require_tools("tmux")
    server = Tmux(short_folder / "tmux.sock")
    yield server
    server.end()


def fits(screen: list[str], columns: int) -> bool:
    """Return True if a lane has the full width and the last line is shown."""
    lanes = [line for line in screen if line.strip().startswith("w0 ") and "█" in line]
    lines = [line for line in screen if line.strip()]
    return (
        len(lanes) == 1
        and columns - 4 <= len(lanes[0].rstrip()) < columns
        and lines[0].startswith("job ")
        and lines[-1].startswith("q quits")
    )


async def test_screen_fits_terminals_of_any_size(tmux: Tmux, run_folder: Path) -> None:
    tmux.start(80, 24, sys.executable, "-m", "cli.main", "top", str(run_folder))
    for columns, lines in ((80, 24), (132, 40), (60, 14)):
        tmux("resize-window", "-x", str(columns), "-y", str(lines))
        await wait_until(
            lambda width=columns: fits(tmux.screen(), width), 20, f"{columns} by {lines}"
        )
    tmux("send-keys", "q")
    await wait_until(
        lambda: tmux("display-message", "-p", "#{pane_dead}").strip() == "1", 20, "its end"
    )
