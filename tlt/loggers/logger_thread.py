"""One logger's line: a thread, so that one that blocks keeps nobody waiting, and what it has had.

A report's number is kept before it is written, so that no step is written twice: one that is killed
in the middle of a write loses that step's figures there, and the journal has them still. A logger
that raises is named in the log and left alone.
"""

import queue
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from tlt.loggers import delivered
from tlt.loggers.backends import Logger
from tlt.report import Report

_log = structlog.get_logger("loggers")


class Line(threading.Thread):
    def __init__(self, name: str, run: Path, make: Callable[[str, str], Logger]) -> None:
        super().__init__(name=name, daemon=True)
        self._run_folder = run
        self._make = make
        self._had = delivered.read(run, name)
        self._waiting: queue.SimpleQueue[Report | None] = queue.SimpleQueue()
        self._busy_since: float | None = None
        # it is told nothing any more, and nobody waits for it
        self.left_alone = False

    def tell(self, report: Report) -> None:
        if report.number >= self._had.reports and not self.left_alone:
            self._waiting.put(report)

    def give_up_if_stuck(self, patience: float) -> None:
        since = self._busy_since
        stuck = since is not None and time.monotonic() - since > patience
        if stuck and not self.left_alone:
            self.leave_alone(f"it did not answer for {patience:.0f} s")

    def leave_alone(self, why: str, trace: str = "") -> None:
        self.left_alone = True
        delivered.write(self._run_folder, self.name, msgspec.structs.replace(self._had, error=why))
        _log.error("logger is left alone", logger=self.name, error=why, trace=trace)

    def finish(self) -> None:
        """When it has had everything, it is closed and the thread ends."""
        self._waiting.put(None)

    def run(self) -> None:
        try:
            self._serve()
        except (Exception, SystemExit) as error:  # whatever a package raises: the job goes on
            # as text: a frame's variables may hold somebody's key
            self.leave_alone(f"{type(error).__name__}: {error}", traceback.format_exc())

    def _serve(self) -> None:
        logger: Logger | None = None
        while (report := self._waiting.get()) is not None:
            self._busy_since = time.monotonic()
            if logger is None:
                self._keep(self._had.reports)
                logger = self._make(self.name, self._had.identity)
            self._keep(report.number + 1)
            logger.write(report)
            if self.left_alone:
                return
            self._busy_since = None
        if logger is not None:
            self._busy_since = time.monotonic()
            logger.close()

    def _keep(self, reports: int) -> None:
        self._had = msgspec.structs.replace(self._had, reports=reports, error=None)
        delivered.write(self._run_folder, self.name, self._had)
