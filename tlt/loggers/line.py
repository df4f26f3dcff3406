"""One logger's line: a thread, so that one that blocks keeps nobody waiting, and what it has had.

A report's number is kept before it is written, so that no step is written twice: one that is killed
in the middle of a write loses that step's figures there, and the journal has them still. A logger
that raises is named in the log and left alone.
"""

import os
import queue
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from tlt.loggers.outlets import Logger
from tlt.policies.ledger import Report

_log = structlog.get_logger("loggers")


class Had(msgspec.Struct, frozen=True, kw_only=True):
    """What a logger was told, by all processes that told it something."""

    identity: str
    reports: int = 0


class Line(threading.Thread):
    def __init__(self, name: str, folder: Path, make: Callable[[str, str], Logger]) -> None:
        super().__init__(name=name, daemon=True)
        self._file = folder / f"{name}.json"
        self._make = make
        self._had = _read(self._file)
        self._waiting: queue.SimpleQueue[Report | None] = queue.SimpleQueue()
        self._busy_since: float | None = None
        self._given_up = False

    def tell(self, report: Report) -> None:
        if report.number >= self._had.reports and not self._given_up:
            self._waiting.put(report)

    def give_up_if_stuck(self, patience: float) -> None:
        since = self._busy_since
        stuck = since is not None and time.monotonic() - since > patience
        if stuck and not self._given_up:
            self._given_up = True
            _log.error("logger blocks, and is left alone", logger=self.name, seconds=patience)

    def finish(self) -> None:
        """When it has had everything, it is closed and the thread ends."""
        self._waiting.put(None)

    def run(self) -> None:
        try:
            self._serve()
        except (Exception, SystemExit) as error:  # whatever a package raises: the job goes on
            self._given_up = True
            _log.exception("logger failed, and is left alone", logger=self.name, error=repr(error))

    def _serve(self) -> None:
        logger: Logger | None = None
        while (report := self._waiting.get()) is not None:
            self._busy_since = time.monotonic()
            if logger is None:
                self._keep(self._had.reports)
                logger = self._make(self.name, self._had.identity)
            self._keep(report.number + 1)
            logger.write(report)
            if self._given_up:
                return
            self._busy_since = None
        if logger is not None:
            self._busy_since = time.monotonic()
            logger.close()

    def _keep(self, reports: int) -> None:
        self._had = msgspec.structs.replace(self._had, reports=reports)
        unfinished = self._file.with_name(f".{self._file.name}")
        unfinished.write_bytes(msgspec.json.encode(self._had))
        os.replace(unfinished, self._file)


def _read(file: Path) -> Had:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Had)
    except (FileNotFoundError, msgspec.DecodeError):
        return Had(identity=secrets.token_hex(4))
