"""When a worker's lease ends: an observer's own clock has seen no new heartbeat for that long.

Neither Redis's clock nor the worker's has a say, so a slow clock or a restart ends no lease.
"""

import msgspec

from tlt.ids import Incarnation, WorkerId
from tlt.protocol.records import Heartbeat


class Lost(msgspec.Struct, frozen=True):
    worker: WorkerId
    incarnation: Incarnation
    silent_seconds: float


class Leases:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # the last pulse seen and when it was new
        self._seen: dict[WorkerId, tuple[tuple[Incarnation, int] | None, float]] = {}
        self._ended: set[WorkerId] = set()

    def observe(self, heartbeats: dict[WorkerId, Heartbeat], now: float) -> list[Lost]:
        """Call it regularly; returns those whose lease has just ended."""
        lost: list[Lost] = []
        for worker, beat in heartbeats.items():
            last, since = self._seen.get(worker, (None, now))
            pulse = (beat.incarnation, beat.counter)
            if pulse != last:
                self._seen[worker] = (pulse, now)
                self._ended.discard(worker)
            elif now - since > self._seconds and worker not in self._ended:
                self._ended.add(worker)
                lost.append(Lost(worker, beat.incarnation, now - since))
        return lost
