"""A job's loggers run in their own process, which reads nothing but the journal."""

import signal
import subprocess
import sys
from pathlib import Path

import structlog

from tlt.base.child_process import die_with_parent
from tlt.spec.config import JobSpec

_log = structlog.get_logger("coordinator")


class LoggerProcesses:
    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, folder: Path, spec: JobSpec) -> None:
        """Start the logger process of a run if its spec names loggers.

        It continues where an earlier one stopped, and ends after it has logged the job's end.
        """
        self._processes = [process for process in self._processes if process.poll() is None]
        if not spec.loggers:
            return
        try:
            (folder / "logs").mkdir(exist_ok=True)
            with open(folder / "logs" / "loggers.out", "ab") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "tlt.loggers.main", str(folder)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    preexec_fn=die_with_parent(signal.SIGTERM),
                )
        except OSError as error:
            _log.error("loggers did not start", error=str(error))
        else:
            self._processes.append(process)
