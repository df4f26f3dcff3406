"""The process that tells a job's loggers: `python -m tlt.loggers.main FOLDER`, of a run.

It follows the run's journal to its end. Told to end before that, it reads what is there and tells
it. One process at a time does that for a run; the next waits until the one before is gone.
"""

import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import structlog

from tlt.config import JobSpec
from tlt.errors import JournalError
from tlt.ids import JobId
from tlt.json_logs import write_logs_to
from tlt.loggers import delivered
from tlt.loggers.backends import Destination, Logger, open_logger
from tlt.loggers.logger_thread import Line
from tlt.report import Report, Reports
from tlt.store.journal import FILE_NAME, START, follow

_POLL_SECONDS = 1.0
# of one write; where there is no network, packages try for a minute or two
_PATIENCE_SECONDS = 180.0
# once the session ends
_LAST_SECONDS = 10.0
# less than whoever computes
_NICENESS = 10
_log = structlog.get_logger("loggers")


def tell(folder: Path, spec: JobSpec, stop: threading.Event) -> bool:
    """Whether every logger was told everything."""

    def make(name: str, identity: str) -> Logger:
        where = Destination(job=folder.name, folder=folder, spec=spec, identity=identity)
        return open_logger(name, where)

    kept = folder / delivered.FOLDER
    kept.mkdir(exist_ok=True)
    with open(kept / "lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lines = [Line(name, folder, make) for name in spec.loggers]
        for line in lines:
            line.start()
        try:
            for report in _reports(folder, spec, stop):
                for line in lines:
                    line.give_up_if_stuck(_PATIENCE_SECONDS)
                    if report is not None:
                        line.tell(report)
        except JournalError:
            _log.exception("the journal cannot be followed")
        return _end(lines, stop)


def _end(lines: Sequence[Line], stop: threading.Event) -> bool:
    begun = time.monotonic()
    for line in lines:
        line.finish()
    for line in lines:
        while line.is_alive() and not line.left_alone:
            line.join(0.05)
            patience = _LAST_SECONDS if stop.is_set() else _PATIENCE_SECONDS
            if time.monotonic() - begun > patience:
                line.leave_alone("it does not end")
    return not any(line.is_alive() for line in lines)


def _reports(folder: Path, spec: JobSpec, stop: threading.Event) -> Iterator[Report | None]:
    """None whenever there is nothing new."""
    reports = Reports(JobId(folder.name), spec, traced="opentelemetry" in spec.loggers)
    position = START
    while not reports.over:
        last = stop.is_set()
        for entry, after in follow(folder / FILE_NAME, position):
            position = after
            yield from reports.add(entry.event, entry.at)
        if last:
            return
        yield None
        stop.wait(_POLL_SECONDS)


def main() -> None:
    folder = Path(sys.argv[1])
    stop = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(name, lambda *_: stop.set())
    os.nice(_NICENESS)
    write_logs_to(folder / "logs", "loggers")
    spec = msgspec.json.decode((folder / "spec.json").read_bytes(), type=JobSpec)
    if not tell(folder, spec, stop):
        os._exit(1)  # a thread that hangs in a package would keep us from ending


if __name__ == "__main__":
    main()
