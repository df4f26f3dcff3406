"""Move `time.time` in the processes of a session by the seconds in a file that they share.

Python imports this module at its start if its folder is on PYTHONPATH. Redis and Ray's daemons keep
the machine's clock, and so does the monotonic clock.
"""

import contextlib
import mmap
import os
import struct
import time

_real = time.time


def _follow(path: str) -> None:
    with open(path, "rb") as file:
        shared = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    time.time = lambda: _real() + struct.unpack("d", shared[:8])[0]


with contextlib.suppress(KeyError, OSError, ValueError):
    _follow(os.environ["TLT_CHAOS_CLOCK"])
