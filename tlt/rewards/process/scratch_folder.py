"""A folder for what a reward's processes write, which is locked as long as its owner lives.

An owner that is killed removes nothing, so the next one removes what dead ones have left.
"""

import contextlib
import fcntl
import os
import tempfile
import time
from pathlib import Path

from tlt.rewards.isolation import remove_folder

_PREFIX = "tlt-reward-"
# a younger one may not be locked yet
_YOUNG_SECONDS = 60.0


class ScratchFolder:
    def __init__(self) -> None:
        _remove_leftovers(Path(tempfile.gettempdir()), time.time())
        self.path = tempfile.mkdtemp(prefix=_PREFIX)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        remove_folder(self.path)
        os.close(self._lock)


def _remove_leftovers(parent: Path, now: float) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            found = folder.stat()
            if found.st_uid != os.getuid() or now - found.st_mtime < _YOUNG_SECONDS:
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_folder(folder)
            finally:
                os.close(lock)
