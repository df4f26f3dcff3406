"""Find the processes of a process namespace, whose numbers mean nothing outside of it."""

import os
from pathlib import Path


def is_inhabited(namespace: str) -> bool:
    """Return True while a process lives in a namespace, named as in `/proc/self/ns/pid`."""
    for process in Path("/proc").glob("[0-9]*/ns/pid"):
        try:
            if os.readlink(process) == namespace:
                return True
        except OSError:
            continue
    return False
