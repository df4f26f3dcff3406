"""Start `tlt dashboard --run` as a process."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def serve_folder(folder: Path) -> Iterator[str]:
    """Serve the folder and yield the address."""
    command = [sys.executable, "-m", "cli.main", "dashboard", "--run", str(folder)]
    with subprocess.Popen(
        [*command, "--port", "0", "--token", "t"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()
