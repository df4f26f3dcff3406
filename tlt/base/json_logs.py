"""Write logs as JSON lines: a file per process in the session's folder, and in those of runs."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import structlog


class _Files:
    """Write to the session's file, and to those of the runs that are served."""

    def __init__(self, folder: Path, process: str) -> None:
        self.process = process
        self._session = _open(folder, process)
        self._runs: list[TextIO] = []

    def serve(self, runs: Sequence[Path]) -> None:
        earlier, self._runs = self._runs, []
        for file in earlier:
            with contextlib.suppress(OSError):
                file.close()
        for run in runs:
            with contextlib.suppress(OSError):
                self._runs.append(_open(run / "logs", self.process))

    def write(self, line: str) -> None:
        """Write a line; on a full disk it is lost, and the process goes on."""
        for file in (self._session, *self._runs):
            with contextlib.suppress(OSError):
                file.write(line)

    def flush(self) -> None:
        """Do nothing: the files are line-buffered."""


_files: _Files | None = None


def write_logs_to(folder: Path, process: str) -> None:
    global _files
    _files = _Files(folder, process)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.WriteLoggerFactory(file=_files),  # pyright: ignore[reportArgumentType]
        cache_logger_on_first_use=True,
    )


def serve_runs(runs: Sequence[Path]) -> None:
    """Also write to the logs of these runs, and to no others, from now on."""
    if _files is not None:
        _files.serve(runs)


def _open(folder: Path, process: str) -> TextIO:
    folder.mkdir(parents=True, exist_ok=True)
    return open(folder / f"{process}.jsonl", "a", buffering=1)
