"""Starting who tells a job's loggers: a process that reads the journal and nothing else."""

import signal
import subprocess
import sys
from pathlib import Path

from tlt.child_process import die_with_parent
from tlt.config import JobSpec


def start_loggers(folder: Path, spec: JobSpec) -> list["subprocess.Popen[bytes]"]:
    """A successor goes on where the one before it ended; none where the spec names no logger."""
    if not spec.loggers:
        return []
    (folder / "logs").mkdir(exist_ok=True)
    with open(folder / "logs" / "loggers.out", "ab") as output:
        return [
            subprocess.Popen(
                [sys.executable, "-m", "tlt.loggers.main", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=die_with_parent(signal.SIGTERM),
            )
        ]
