"""The process that sends a run's reports to its loggers: `python -m tlt.loggers.main FOLDER`.

It follows the run's journal to its end. On SIGTERM it sends the entries up to that moment and
ends. One process at a time serves a run; a second one waits until the first has ended.
"""

import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import structlog

from tlt.base.id_types import JobId
from tlt.base.json_logs import write_logs_to
from tlt.errors import JournalError
from tlt.loggers import delivery_state
from tlt.loggers.backends import LoggedRun, Logger, open_logger
from tlt.loggers.logger_thread import LoggerThread
from tlt.report import LoggerReport, LoggerReports
from tlt.runs.run_folder_reader import read_spec
from tlt.spec.config import JobSpec
from tlt.store.journal import FILE_NAME, START, follow

_POLL_SECONDS = 1.0
# for one write; without a network, packages try for a minute or two
_MOST_SECONDS = 180.0
# for all writes once the session ends
_LAST_SECONDS = 10.0
# yield the processors to the ranks
_NICENESS = 10
_log = structlog.get_logger("loggers")


def serve_loggers(folder: Path, spec: JobSpec, stop: threading.Event) -> bool:
    """Return True if every logger ended, with all reports or abandoned after an error."""

    def make(name: str, identity: str) -> Logger:
        return open_logger(name, LoggedRun(folder.name, folder, spec, identity))

    state_folder = folder / delivery_state.FOLDER
    state_folder.mkdir(exist_ok=True)
    with open(state_folder / "lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        threads = [LoggerThread(name, folder, make) for name in spec.loggers]
        for thread in threads:
            thread.start()
        try:
            for report in _reports(folder, spec, stop):
                for thread in threads:
                    thread.abandon_if_stuck(_MOST_SECONDS)
                    if report is not None:
                        thread.send(report)
        except JournalError:
            _log.exception("the journal cannot be followed")
        return _end(threads, stop)


def _end(threads: Sequence[LoggerThread], stop: threading.Event) -> bool:
    began = time.monotonic()
    for thread in threads:
        thread.finish()
    for thread in threads:
        while thread.is_alive() and not thread.abandoned:
            thread.join(0.05)
            most_seconds = _LAST_SECONDS if stop.is_set() else _MOST_SECONDS
            if time.monotonic() - began > most_seconds:
                thread.abandon("it does not end")
    return not any(thread.is_alive() for thread in threads)


def _reports(folder: Path, spec: JobSpec, stop: threading.Event) -> Iterator[LoggerReport | None]:
    """Yield reports as the journal grows, and None whenever there is nothing new."""
    reports = LoggerReports(JobId(folder.name), spec, traced="opentelemetry" in spec.loggers)
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
    if not serve_loggers(folder, read_spec(folder), stop):
        os._exit(1)  # a thread that hangs in a package would keep the process alive


if __name__ == "__main__":
    main()
