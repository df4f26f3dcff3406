"""A thread for each logger, so that one that blocks delays no other.

A report's number is stored before the report is sent, so that no step is sent twice: a process that
is killed while it sends loses that step's figures there, and the journal still has them. A logger
that raises is named in the log and not called any more.
"""

import queue
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from tlt.loggers import delivery_state
from tlt.loggers.backends import Logger
from tlt.report import LoggerReport

_log = structlog.get_logger("loggers")


class LoggerThread(threading.Thread):
    def __init__(self, name: str, run: Path, make: Callable[[str, str], Logger]) -> None:
        super().__init__(name=name, daemon=True)
        self._run_folder = run
        self._make = make
        self._state = delivery_state.read(run, name)
        self._queue: queue.SimpleQueue[LoggerReport | None] = queue.SimpleQueue()
        self._busy_since: float | None = None
        # it gets no more reports, and the process does not wait for it
        self.abandoned = False

    def send(self, report: LoggerReport) -> None:
        if report.number >= self._state.reports and not self.abandoned:
            self._queue.put(report)

    def abandon_if_stuck(self, most_seconds: float) -> None:
        since = self._busy_since
        stuck = since is not None and time.monotonic() - since > most_seconds
        if stuck and not self.abandoned:
            self.abandon(f"it did not answer for {most_seconds:.0f} s")

    def abandon(self, why: str, trace: str = "") -> None:
        self.abandoned = True
        state = msgspec.structs.replace(self._state, error=why)
        delivery_state.write(self._run_folder, self.name, state)
        _log.error("logger is not called any more", logger=self.name, error=why, trace=trace)

    def finish(self) -> None:
        """Close the logger and end the thread once all reports are sent."""
        self._queue.put(None)

    def run(self) -> None:
        try:
            self._serve()
        except (Exception, SystemExit) as error:  # whatever a package raises: the job goes on
            # as text: a frame's variables may hold an API key
            self.abandon(f"{type(error).__name__}: {error}", traceback.format_exc())

    def _serve(self) -> None:
        logger: Logger | None = None
        while (report := self._queue.get()) is not None:
            self._busy_since = time.monotonic()
            if logger is None:
                self._store(self._state.reports)
                logger = self._make(self.name, self._state.identity)
            self._store(report.number + 1)
            logger.write(report)
            if self.abandoned:
                return
            self._busy_since = None
        if logger is not None:
            self._busy_since = time.monotonic()
            logger.close()

    def _store(self, reports: int) -> None:
        self._state = msgspec.structs.replace(self._state, reports=reports, error=None)
        delivery_state.write(self._run_folder, self.name, self._state)
