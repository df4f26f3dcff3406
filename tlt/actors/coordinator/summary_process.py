"""A job's summary is written by a process of its own, because plotting takes seconds."""

import signal
import subprocess
import sys
from pathlib import Path

import structlog

from tlt.base.child_process import die_with_parent
from tlt.runs.run_folder_reader import has_journal
from tlt.runs.run_summary_files import SUMMARY

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
            (folder / "logs").mkdir(exist_ok=True)
            with open(folder / "logs" / "summary.out", "ab") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "tlt.runs.run_summary_files", str(folder)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    preexec_fn=die_with_parent(signal.SIGTERM),
                )
        except OSError as error:
            _log.error("no summary was written", folder=str(folder), error=str(error))
        else:
            self._processes.append(process)
