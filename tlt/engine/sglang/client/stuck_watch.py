"""Tell schedulers that compute for long, as they do to compile a kernel, from ones that hang.

Processor time alone would not do, because a scheduler that waits for a device which hangs may spin.
"""

import os
from collections.abc import Callable, Collection
from pathlib import Path
from time import monotonic
from typing import NamedTuple

# a call that computes is stuck after so many times as long as one that does not
MOST_EXTENSIONS = 5
# of a core: waiting processes take less
_LEAST_LOAD = 0.1
_SECONDS_BETWEEN_LOOKS = 1.0
# places in /proc/PID/stat after the name: parent, own ticks, and those of children that have ended
_PARENT, _TICKS = 1, slice(11, 15)


class _Look(NamedTuple):
    at: float
    cpu_seconds: float


class StuckWatch:
    def __init__(self, stuck_seconds: float, cpu_seconds: Callable[[], float]) -> None:
        """Call `cpu_seconds` for the processor time of what is watched, at most once a second."""
        self._stuck_seconds = stuck_seconds
        self._cpu_seconds = cpu_seconds
        self.note_progress()

    def note_progress(self) -> None:
        """Note that something was finished."""
        # when something was last finished, and when anything was last computed
        self._finished = self._computed = monotonic()
        self._look: _Look | None = None

    def complaint(self) -> str | None:
        """Say what it does instead of finishing something, or return None if it may go on."""
        now = monotonic()
        before = self._look
        since = self._finished if before is None else before.at
        if now - since >= min(_SECONDS_BETWEEN_LOOKS, self._stuck_seconds / 4):
            self._look = _Look(now, self._cpu_seconds())
            if before is not None and _load(before, self._look) >= _LEAST_LOAD:
                self._computed = now
        if now - self._computed > self._stuck_seconds:
            return f"stood still for {self._stuck_seconds:.0f} s"
        if (unfinished := now - self._finished) > MOST_EXTENSIONS * self._stuck_seconds:
            return f"computed for {unfinished:.0f} s without finishing anything"
        return None


def tree_cpu_seconds(roots: Collection[int]) -> float:
    """Return the processor time of processes, and of all that they have started."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for pid, fields in _stats():
        parents[pid] = int(fields[_PARENT])
        ticks[pid] = sum(map(int, fields[_TICKS]))
    watched = set(roots)
    # a child's number may be smaller than its parent's
    while found := {pid for pid, parent in parents.items() if parent in watched} - watched:
        watched |= found
    return sum(ticks.get(pid, 0) for pid in watched) / os.sysconf("SC_CLK_TCK")


def _load(before: _Look, after: _Look) -> float:
    return (after.cpu_seconds - before.cpu_seconds) / (after.at - before.at)


def _stats() -> list[tuple[int, list[str]]]:
    found: list[tuple[int, list[str]]] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            _, _, rest = (folder / "stat").read_text().rpartition(")")
        except OSError:  # it has ended
            continue
        found.append((int(folder.name), rest.split()))
    return found
