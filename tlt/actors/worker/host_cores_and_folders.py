"""The host that a worker runs on: its address, the cores of the worker, and its files there.

In a cluster the workers of a host hold a lock on the session's folders of that host, so that
another session of the same user doesn't remove them as those of a dead one.
"""

import contextlib
import fcntl
import os
import shutil
import signal
from pathlib import Path

import ray

from tlt.base.end_session_processes import children
from tlt.session.leftovers import remove_leftovers, share
from tlt.session.session_files import short_folder
from tlt.spec.config import RayCluster, SessionSpec


def pinned_cores(workers: int, ranks: int) -> list[list[list[int]]]:
    """Return the cores of each worker's ranks, or no cores if there are fewer than ranks."""
    available = sorted(os.sched_getaffinity(0))
    each = len(available) // (workers * ranks)
    return [
        [
            available[(worker * ranks + rank) * each : (worker * ranks + rank + 1) * each]
            for rank in range(ranks)
        ]
        for worker in range(workers)
    ]


class WorkerHost:
    """Hold what a worker of a cluster has on its host."""

    def __init__(self, spec: SessionSpec, cluster: RayCluster) -> None:
        self.address: str = ray.util.get_node_ip_address()
        self._places = [Path(spec.flight), short_folder(Path(spec.folder))]
        session = Path(spec.folder)
        remove_leftovers(except_of=session)
        # held until the process ends
        self._locks = [share(place, session) for place in self._places]
        scratch = self._places[1] / "tmp"
        scratch.mkdir(mode=0o700, exist_ok=True)
        os.environ["TMPDIR"] = str(scratch)
        slot = self._take_slot(cluster.workers_per_host)
        # a worker too many, of a host that is larger than others, shares all cores
        free: list[list[int]] = [[]] * spec.ranks_per_worker
        pinned = pinned_cores(cluster.workers_per_host, spec.ranks_per_worker)
        self.cores = free if slot is None else pinned[slot]

    def end_ranks(self) -> None:
        """Kill all processes that this one has started."""
        for pid in children(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def remove_files(self) -> None:
        """Remove the session's folders of this host."""
        for place in self._places:
            shutil.rmtree(place, ignore_errors=True)

    def _take_slot(self, slots: int) -> int | None:
        """Return a number that no other worker of this host has, or None if all are taken."""
        for slot in range(slots):
            file = open(self._places[1] / f"slot-{slot}", "ab")  # noqa: SIM115
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
            else:
                self._locks.append(file)
                return slot
        return None
