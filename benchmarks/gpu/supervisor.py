"""Run parts in child processes, end those that overrun, and keep every outcome at once.

The results' file is replaced whole after each outcome, so that whatever is killed leaves those
before. A part that overruns ends its process; the parts after it get another.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.gpu.parts import Outcome, Part, Status
from tlt.base.child_process import die_with_parent, last_line

# a part isn't begun with less; a process that has done all parts ends by itself in so many
_LEAST_SECONDS, _LEAVING_SECONDS = 5.0, 10.0
# threads that share cores with other programs wait for each other
_VARIABLES = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


class Results:
    """The outcomes so far, in a file."""

    def __init__(self, file: Path, facts: Mapping[str, Any]) -> None:
        self.outcomes: list[Outcome] = []
        self._file = file
        self._facts = facts
        self._began = time.monotonic()
        self._write()

    def add(self, outcome: Outcome) -> None:
        """Add an outcome, in place of the one that said that the check had begun."""
        if self.outcomes and self.outcomes[-1].status == "not done":
            self.outcomes.pop()
        self.outcomes.append(outcome)
        self._write()
        if outcome.status != "not done":
            what = outcome.why or outcome.figures
            print(outcome.part, outcome.check, outcome.status, what, flush=True)

    def add_all(self, parts: Iterable[str], status: Status, why: str) -> None:
        for part in parts:
            self.add(Outcome(part=part, check="all", status=status, why=why))

    def end(self, part: str, why: str) -> None:
        """Say that a part ended before its last check was done."""
        last = self.outcomes[-1] if self.outcomes else None
        check = last.check if last is not None and last.status == "not done" else "end"
        self.add(Outcome(part=part, check=check, status="failed", why=why))

    def _write(self) -> None:
        parts: dict[str, list[Outcome]] = {}
        for outcome in self.outcomes:
            parts.setdefault(outcome.part, []).append(outcome)
        seconds = round(time.monotonic() - self._began, 1)
        text = msgspec.json.encode({**self._facts, "seconds": seconds, "parts": parts})
        new = self._file.with_suffix(".new")
        new.write_bytes(msgspec.json.format(text) + b"\n")
        new.replace(self._file)


class _Child:
    """A process that runs parts, and ends with its parent."""

    def __init__(self, parts: Mapping[str, Part], device: str, folder: Path, log: Path) -> None:
        self._outcomes, theirs = os.pipe()
        self._log, self._line = log, b""
        # how long it may take to exit
        self._leaving = 0.0
        setup = {
            "parts": {name: part.entry for name, part in parts.items()},
            "device": device,
            "folder": str(folder),
            "descriptor": theirs,
        }
        command = [sys.executable, "-m", "benchmarks.gpu.run_parts"]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*command, msgspec.json.encode(setup).decode()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs,),
                env={**os.environ, **_VARIABLES},
                preexec_fn=die_with_parent(signal.SIGKILL),
                start_new_session=True,
            )
        os.close(theirs)

    def read(self, deadline: float) -> list[Outcome]:
        """Return the next outcomes, or none after the last; raise TimeoutError if none comes."""
        while True:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._outcomes], [], [], left)[0]:
                raise TimeoutError
            if not (read := os.read(self._outcomes, 1 << 16)):
                self._leaving = _LEAVING_SECONDS
                return []
            *lines, self._line = (self._line + read).split(b"\n")
            if lines:
                return [msgspec.json.decode(line, type=Outcome) for line in lines]

    def end(self) -> str:
        """End the process with its children; return how it had ended if it failed."""
        status = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(self._leaving)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._outcomes)
        line = last_line(self._log.read_bytes()[-(1 << 12) :])
        return f"the process ended with {status}: {line}" if status else ""


class Supervisor:
    def __init__(self, device: str, folder: Path, log: Path, results: Results) -> None:
        """Keep what parts write in `folder`, and what they print in `log`."""
        self._device = device
        self._folder = folder
        self._log = log
        self._results = results

    def run(self, parts: Mapping[str, Part], seconds: float) -> None:
        """Run parts for so many seconds at most, those of one process together."""
        end, left = time.monotonic() + seconds, dict(parts)
        while left:
            shared = next(iter(left.values())).process
            group = {name: part for name, part in left.items() if part.process == shared}
            if end - time.monotonic() < _LEAST_SECONDS:
                self._results.add_all(left, "not begun", "the time is spent")
                return
            for name in self._run_process(group, end):
                del left[name]

    def _run_process(self, parts: Mapping[str, Part], end: float) -> list[str]:
        """Run parts until one overruns or the last is over; return those that are over."""
        names = list(parts)
        current, deadline = names[0], min(end, time.monotonic() + parts[names[0]].budget)
        child, why = _Child(parts, self._device, self._folder, self._log), ""
        try:
            while outcomes := child.read(deadline):
                for outcome in outcomes:
                    self._results.add(outcome)
                    if outcome.part != current:
                        current = outcome.part
                        deadline = min(end, time.monotonic() + parts[current].budget)
        except TimeoutError:
            why = f"not done in {parts[current].budget:.0f} s, or when the time was spent"
        finally:
            why = child.end() or why
        if not why:
            return names
        self._results.end(current, why)
        return names[: names.index(current) + 1]
