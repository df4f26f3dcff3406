"""A run's loggers and its summary have processes of their own, which read only the journal."""

import signal
import subprocess
import sys
from pathlib import Path

import structlog

from tlt.base.child_process import die_with_parent
from tlt.runs.run_folder_reader import has_journal
from tlt.runs.run_summary_files import SUMMARY
from tlt.spec.config import JobSpec

_log = structlog.get_logger("coordinator")


class SummaryProcesses:
    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, folder: Path) -> None:
        """Summarise a run that has ended, unless it never began or is summarised already."""
        self._processes = [process for process in self._processes if process.poll() is None]
        if (folder / SUMMARY).exists() or not has_journal(folder):
            return
        try:
            process = _start_process(folder, "tlt.runs.run_summary_files", "summary.out")
        except OSError as error:
            _log.error("no summary was written", folder=str(folder), error=str(error))
        else:
            self._processes.append(process)


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
            process = _start_process(folder, "tlt.loggers.main", "loggers.out")
        except OSError as error:
            _log.error("loggers did not start", error=str(error))
        else:
            self._processes.append(process)


def _start_process(folder: Path, module: str, log: str) -> "subprocess.Popen[bytes]":
    """Run a module on a run's folder; what it prints goes into a file of the folder's logs."""
    (folder / "logs").mkdir(exist_ok=True)
    with open(folder / "logs" / log, "ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", module, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=die_with_parent(signal.SIGTERM),
        )
