"""A worker's lease ends when no new heartbeat has come for its length, by the observer's clock.

Neither Redis's clock nor the worker's is read, so a slow clock or a restart ends no lease. Time in
which Redis doesn't answer doesn't count, because no worker can send a heartbeat.
"""

from tlt.base.id_types import Incarnation, WorkerId
from tlt.protocol.events import WorkerLost
from tlt.protocol.shared_values import Heartbeat


class Leases:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # incarnation and counter of the last new heartbeat, and the time at which it was seen
        self._seen: dict[WorkerId, tuple[tuple[Incarnation, int] | None, float]] = {}
        self._ended: set[WorkerId] = set()
        self._skipped = 0.0

    def skip(self, seconds: float) -> None:
        """Leave out a time, before the next observation, in which no worker could be heard."""
        self._skipped += seconds

    def observe(self, heartbeats: dict[WorkerId, Heartbeat], now: float) -> list[WorkerLost]:
        """Return the losses of workers whose lease has just ended; call it regularly."""
        lost: list[WorkerLost] = []
        now -= self._skipped
        for worker, heartbeat in heartbeats.items():
            last, since = self._seen.get(worker, (None, now))
            pulse = (heartbeat.incarnation, heartbeat.counter)
            if pulse != last:
                self._seen[worker] = (pulse, now)
                self._ended.discard(worker)
            elif now - since > self._seconds and worker not in self._ended:
                self._ended.add(worker)
                lost.append(
                    WorkerLost(
                        worker=worker,
                        incarnation=heartbeat.incarnation,
                        reason=f"no heartbeat for {now - since:.0f} s",
                        returning=False,
                    )
                )
        return lost
