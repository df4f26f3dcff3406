"""`tlt top` as it stands on a screen: captured from tmux, at 80 by 24 and after it was resized."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import wait_until


class Tmux:
    """A server of its own, which knows nobody's configuration."""

    def __init__(self, socket: Path) -> None:
        self._tmux = ["tmux", "-u", "-f", "/dev/null", "-S", str(socket)]

    def start(self, columns: int, lines: int, *command: str) -> None:
        size = "-x", str(columns), "-y", str(lines)
        # who runs the tests may have said how large their own terminal is
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
    if shutil.which("tmux") is None:
        pytest.skip("there is no tmux: apt-get install tmux")
    server = Tmux(short_folder / "tmux.sock")
    yield server
    server.end()


def fits(screen: list[str], columns: int) -> bool:
    """A lane from one side to the other, and nothing cut off below."""
    lanes = [line for line in screen if line.strip().startswith("w0 ") and "█" in line]
    told = [line for line in screen if line.strip()]
    return (
        len(lanes) == 1
        and columns - 4 <= len(lanes[0].rstrip()) < columns
        and told[0].startswith("job ")
        and told[-1].startswith("q quits")
    )


async def test_lanes_stand_on_the_screen_at_any_size(tmux: Tmux, run_folder: Path) -> None:
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
