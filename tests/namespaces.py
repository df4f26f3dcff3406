"""Run programs where namespaces are forbidden, and find the processes of a process namespace."""

import os
from pathlib import Path

# before a command: a user namespace that allows no other in it, as many containers do
WITHOUT_NAMESPACES = (
    *("unshare", "--user", "--map-root-user", "sh", "-c"),
    'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"',
    "sh",
)


def is_inhabited(namespace: str) -> bool:
    """Return True while a process lives in a namespace, named as in `/proc/self/ns/pid`."""
    for process in Path("/proc").glob("[0-9]*/ns/pid"):
        try:
            if os.readlink(process) == namespace:
                return True
        except OSError:
            continue
    return False
