"""Write logs as JSON lines: a file per process in the session's folder, and in a run's."""

import contextlib
from pathlib import Path
from typing import TextIO

import structlog


class _Files:
    """Write to the session's file, and to the run's while there is one."""

    def __init__(self, folder: Path, process: str) -> None:
        self.process = process
        self._session = _open(folder, process)
        self._run: TextIO | None = None

    def serve(self, run: Path | None) -> None:
        earlier, self._run = self._run, None
        with contextlib.suppress(OSError):
            if earlier is not None:
                earlier.close()
        with contextlib.suppress(OSError):
            self._run = None if run is None else _open(run / "logs", self.process)

    def write(self, line: str) -> None:
        """Write a line; on a full disk it is lost, and the process goes on."""
        for file in (self._session, self._run):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.write(line)

    def flush(self) -> None:
        """Do nothing: both files are line-buffered."""


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


def serve_run(run: Path | None) -> None:
    """Also write to this run's logs from now on; None stops that."""
    if _files is not None:
        _files.serve(run)


def _open(folder: Path, process: str) -> TextIO:
    folder.mkdir(parents=True, exist_ok=True)
    return open(folder / f"{process}.jsonl", "a", buffering=1)
