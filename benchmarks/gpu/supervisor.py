"""Run parts in child processes, those of one process together, and go on after one that dies."""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.outcomes import Outcome, Outcomes
from benchmarks.gpu.parts import Part
from benchmarks.gpu.run_parts import run_parts
from tlt.base.child_process import last_line
from tlt.blobs.blob_files import free_bytes
from tlt.session.leftovers import claim, remove_leftovers
from tlt.session.session_files import shared_memory, short_name_prefix

# a part isn't begun with less
_LEAST_SECONDS = 5.0


@contextmanager
def memory_folder(least_bytes: int = 0) -> Generator[Path]:
    """Yield a folder in memory, and remove it; the next run or session removes a killed run's.

    A container's shared memory may be too small; then the folder is on a disk.
    """
    remove_leftovers(except_of=Path())
    place = shared_memory()
    if (free := free_bytes(place)) < least_bytes:
        print(f"{place} has {free >> 20} MB, so files are in {tempfile.gettempdir()}", flush=True)
        place = Path(tempfile.gettempdir())
    folder = place / f"{short_name_prefix()}gpu-{os.getpid()}"
    with claim(folder, folder):
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class Supervisor(NamedTuple):
    machine: Machine
    outcomes: Outcomes

    def run(self, parts: Mapping[str, Part], seconds: float) -> None:
        """Run parts for so many seconds at most."""
        end, left = time.monotonic() + seconds, dict(parts)
        while left and end - time.monotonic() >= _LEAST_SECONDS:
            process = next(iter(left.values())).process
            group = {name: part for name, part in left.items() if part.process == process}
            for name in self._run_process(group, end):
                del left[name]
        for name in left:
            why = "the time is spent"
            self.outcomes.add(Outcome(part=name, check="all", status="not begun", why=why))

    def _run_process(self, parts: dict[str, Part], end: float) -> list[str]:
        """Run parts until the last is over, or one ends their process; return those over."""
        file, names = self.outcomes.file, list(parts)
        status = _wait_for(parts, end, self.machine, file)
        last = Outcome(part=names[0], check="preparation", status="begun")
        for outcome in self.outcomes.read():
            last = outcome if outcome.part in parts else last
        if last.status != "begun" and (last.part, last.check) == (names[-1], "end"):
            return names
        why = f"not done in {parts[last.part].budget:.0f} s, or when the time was spent"
        if status != -signal.SIGALRM:
            line = last_line(file.with_suffix(".log").read_bytes()[-(1 << 12) :])
            why = f"the process ended with {status}: {line}"
        self.outcomes.add(Outcome(part=last.part, check=last.check, status="failed", why=why))
        return names[: names.index(last.part) + 1]


def _wait_for(parts: dict[str, Part], end: float, machine: Machine, file: Path) -> int | None:
    """Run parts in a process of their own, and return how it ended."""
    child = get_context("spawn").Process(target=run_parts, args=(parts, end, machine, file))
    child.start()
    assert child.pid is not None
    try:
        child.join()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    return child.exitcode
