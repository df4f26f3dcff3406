"""Take a session's disk, shared memory, Redis memory or clock away for some seconds."""

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.fault import Chaos, Fault, Healed, NotNow, hold

_SECONDS, _FULL_SECONDS = 3.0, 10.0


def _fill_disk(chaos: Chaos) -> Healed:
    return _fill(chaos, chaos.session.live.runs)


def _fill_sessions_disk(chaos: Chaos) -> Healed:
    """Fill the disk of Redis, of the session's journal and of the logs."""
    return _fill(chaos, chaos.session.folder)


def _fill_shared_memory(chaos: Chaos) -> Healed:
    return _fill(chaos, Path(chaos.session.spec.flight))


def _fill(chaos: Chaos, folder: Path) -> Healed:
    if folder not in chaos.session.mounts:
        raise NotNow("no file system can be mounted here")
    before = _incarnations(chaos)
    with _full(folder):
        # a rank that can't write ends
        hold(_FULL_SECONDS, lambda: _incarnations(chaos) != before)
    return None


def _incarnations(chaos: Chaos) -> set[int]:
    return {int(beat.incarnation) for beat in chaos.session.workers().values()}


@contextmanager
def _full(folder: Path) -> Iterator[None]:
    filler = folder / "filler"
    try:
        with open(filler, "wb") as file, contextlib.suppress(OSError):
            size = 0
            # others write meanwhile
            while free := os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize:
                os.posix_fallocate(file.fileno(), size, free)
                size += free
        yield
    finally:
        filler.unlink()


def _exhaust_redis(chaos: Chaos) -> Healed:
    """Have Redis refuse whatever would take memory."""
    redis = chaos.session.redis
    redis.config_set("maxmemory", 1)
    try:
        hold(_SECONDS)
    finally:
        redis.config_set("maxmemory", 0)
    return None


def _set_clock_back(chaos: Chaos) -> Healed:
    """Set it back by up to a day, and leave it there."""
    chaos.session.move_clock(-chaos.dice.uniform(60.0, 86400.0))
    return None


RESOURCES: dict[str, Fault] = {
    "fill the disk": _fill_disk,
    "fill the session's disk": _fill_sessions_disk,
    "fill the shared memory": _fill_shared_memory,
    "let Redis run out of memory": _exhaust_redis,
    "set the clock back": _set_clock_back,
}
