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
# places in /proc/PID/stat after the name: parent; page faults and ticks, own ones and those of
# children that have ended
_PARENT, _FAULTS, _TICKS = 1, slice(7, 11), slice(11, 15)
# one engine of a host compiles a kernel, and the others wait for it without working
_COMPILERS = frozenset({"ninja", "nvcc", "cicc", "ptxas", "cudafe++", "fatbinary", "cc1plus", "ld"})
# a process that reads weights from a slow disk computes little, but touches new pages all the time
_FAULT_SECONDS = 1e-3


class _Look(NamedTuple):
    at: float
    busy_seconds: float


class StuckWatch:
    def __init__(self, stuck_seconds: float, busy_seconds: Callable[[], float]) -> None:
        """Call `busy_seconds` for what the watched processes did so far, at most once a second."""
        self._stuck_seconds = stuck_seconds
        self._busy_seconds = busy_seconds
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
            self._look = _Look(now, self._busy_seconds())
            if before is not None and _load(before, self._look) >= _LEAST_LOAD:
                self._computed = now
        if now - self._computed > self._stuck_seconds:
            return f"stood still for {self._stuck_seconds:.0f} s"
        if (unfinished := now - self._finished) > MOST_EXTENSIONS * self._stuck_seconds:
            return f"computed for {unfinished:.0f} s without finishing anything"
        return None


def tree_busy_seconds(roots: Collection[int]) -> float:
    """Return the seconds that processes, what they have started, and compilers worked or read."""
    parents: dict[int, int] = {}
    busy: dict[int, float] = {}
    watched = set(roots)
    for pid, name, fields in _stats():
        parents[pid] = int(fields[_PARENT])
        if name in _COMPILERS:
            watched.add(pid)
        ticks, faults = (sum(map(int, fields[place])) for place in (_TICKS, _FAULTS))
        busy[pid] = ticks / os.sysconf("SC_CLK_TCK") + faults * _FAULT_SECONDS
    # a child's number may be smaller than its parent's
    while found := {pid for pid, parent in parents.items() if parent in watched} - watched:
        watched |= found
    return sum(busy.get(pid, 0.0) for pid in watched)


def _load(before: _Look, after: _Look) -> float:
    return (after.busy_seconds - before.busy_seconds) / (after.at - before.at)


def _stats() -> list[tuple[int, str, list[str]]]:
    """Return the id, the name and the other fields of each of this user's processes."""
    found: list[tuple[int, str, list[str]]] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.stat().st_uid != os.getuid():
                continue
            before, _, rest = (folder / "stat").read_text().rpartition(")")
        except OSError:  # it has ended
            continue
        found.append((int(folder.name), before.partition("(")[2], rest.split()))
    return found
