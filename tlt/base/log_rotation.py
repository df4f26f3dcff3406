"""Keep log files small: what exceeds the limit becomes the file's older part.

The processes that write a log hold it open to append, so it is copied and then emptied; lines that
are written between the two are lost.
"""

import contextlib
import os
import shutil
from itertools import pairwise
from pathlib import Path

MOST_BYTES = 32 << 20
# a log and its older parts
KEPT = 3
_SUFFIXES = (".jsonl", ".log", ".out")


def bound_logs(folder: Path, most_bytes: int = MOST_BYTES) -> None:
    """Bound each log that lies directly in a folder; on a full disk it loses its older lines."""
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            if entry.name.endswith(_SUFFIXES) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    if entry.stat().st_size > most_bytes:
                        _rotate(Path(entry.path))


def _rotate(log: Path) -> None:
    parts = [log.with_name(f"{log.name}.{age}") for age in range(1, KEPT)]
    for newer, older in reversed(list(pairwise(parts))):
        if newer.exists():
            newer.replace(older)
    try:
        shutil.copyfile(log, parts[0])
    finally:
        os.truncate(log, 0)
