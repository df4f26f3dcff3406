"""Tell the folders of a session that is up from those that a dead one has left, and remove these.

A session has a folder for sockets in /tmp and one for blobs in shared memory. Its supervisor holds
a lock on a file in each as long as it lives, whichever namespace it lives in.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tlt.base.end_session_processes import end_processes, processes_of
from tlt.errors import TltError
from tlt.session.session_files import blobs_in_flight, is_up, shared_memory, short_name_prefix

# holds the path of the session's folder
OWNER_FILE = "owner"
_CLAIM_SECONDS = 30.0
_POLL_SECONDS = 0.02


def claim(place: Path, session: Path) -> BinaryIO:
    """Make a folder of a session; it is the session's until the returned file is closed."""
    deadline = time.monotonic() + _CLAIM_SECONDS
    while True:
        owner = _open_owner(place)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(owner, place / OWNER_FILE):
                _write_owner(owner, session)
                return owner
        # another session may be removing it, as what a dead session has left
        owner.close()
        if time.monotonic() > deadline:
            raise TltError(f"{place}: another process uses it")
        time.sleep(_POLL_SECONDS)


def share(place: Path, session: Path) -> BinaryIO:
    """Make a folder of a session on a host that several of its processes hold at once.

    On the supervisor's host that holds it already, and for as long as the others need it.
    """
    owner = _open_owner(place)
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(owner, fcntl.LOCK_SH | fcntl.LOCK_NB)
        _write_owner(owner, session)
    return owner


def remove_leftovers(*, except_of: Path) -> list[Path]:
    """Remove what dead sessions of this user have left, but for one session; return the folders."""
    return [place for place in _places() if _remove_if_dead(place, except_of)]


def remove_dead_session(session: Path, short: Path) -> bool:
    """Remove what a session has left that is not up; return False if there is nothing."""
    if is_up(session):
        return False
    found = [place for place in (short, blobs_in_flight(short)) if place.exists()]
    processes = processes_of(session)
    end_processes(session)
    for place in found:
        shutil.rmtree(place, ignore_errors=True)
    return bool(found or processes)


def _places() -> Iterator[Path]:
    for parent in {Path(tempfile.gettempdir()), shared_memory()}:
        yield from sorted(parent.glob(f"{short_name_prefix()}*"))


def _remove_if_dead(place: Path, except_of: Path) -> bool:
    try:
        if place.is_symlink() or place.stat().st_uid != os.getuid():
            return False
        with open(place / OWNER_FILE, "rb") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            session = Path(os.fsdecode(owner.read()))
            if session == except_of or not session.is_absolute():
                return False
            # one that was started again with another TMPDIR has other folders
            if not is_up(session):
                end_processes(session)
            shutil.rmtree(place, ignore_errors=True)
            return True
    except (OSError, TltError):  # it is in use, or not of this release, or does not end
        return False


def _open_owner(place: Path) -> BinaryIO:
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_own(place)
    return open(place / OWNER_FILE, "ab")


def _write_owner(owner: BinaryIO, session: Path) -> None:
    owner.truncate(0)
    owner.write(os.fsencode(session))
    owner.flush()


def _require_own(place: Path) -> None:
    """Refuse a folder that somebody else made under the name, which is easy to guess."""
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise TltError(f"{place}: it must be a folder of your own; another TMPDIR avoids it")
    place.chmod(0o700)


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Return False if the file was removed after it had been opened."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
