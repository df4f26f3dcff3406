"""Keep the rows and functions that programs hand over as long as a job's spec names them.

A lock covers writing and submitting, so that nobody removes what is about to be named.
"""

import contextlib
import fcntl
from collections.abc import Generator, Iterable
from pathlib import Path

import msgspec

from tlt.protocol.shared_values import JobRecord
from tlt.store.job_requests import ENDED_STATUSES

# in the folder of runs
_FOLDER = "inputs"
_LOCK = ".lock"
# what may lie in the folder of a job that is queued: the checkpoint that it starts from, or its URL
_QUEUED_JOBS_FILES = frozenset({"blobs", "blobs-url"})


@contextlib.contextmanager
def locked_folder(runs: Path) -> Generator[Path]:
    """Yield the folder for inputs; nobody else writes to it meanwhile."""
    folder = runs / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / _LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def discard_unnamed(folder: Path, records: Iterable[JobRecord]) -> None:
    """Remove what no spec names: neither of a run's folder nor of a session's job."""
    known = {Path(record.folder): record for record in records}
    specs = [
        msgspec.json.encode(record.spec).decode()
        for record in known.values()
        if record.status not in ENDED_STATUSES
    ]
    for run in (each for each in folder.parent.iterdir() if each.is_dir() and each != folder):
        file = run / "spec.json"
        if file.is_file():
            specs.append(file.read_text())
        elif run not in known and {each.name for each in run.iterdir()} <= _QUEUED_JOBS_FILES:
            return  # it may be a job that another session has queued
    for file in folder.iterdir():
        if file.name != _LOCK and not any(file.name in spec for spec in specs):
            file.unlink()
