"""Simulate what the session does when a job is paused, and when it goes on."""

from typing import TYPE_CHECKING

from tests.simulation.moves import Move
from tests.simulation.worker_events import JOB
from tlt.id_types import Incarnation, WorkerId
from tlt.policies.job.run_state import Phase
from tlt.protocol.events import (
    JobPauseRequested,
    JobResumed,
    JobStarted,
    RunEvent,
    WorkerJoined,
    WorkerLost,
)
from tlt.protocol.shared_values import WorkerInfo

if TYPE_CHECKING:
    from tests.simulation.world import World


class Pauses:
    def __init__(self, world: "World") -> None:
        self.world = world
        # the run has given back its workers, which may serve another job
        self.suspended = False
        self.count = 0
        # the session's workers
        self.joined: dict[WorkerId, WorkerInfo] = {}
        self.newest: dict[WorkerId, Incarnation] = {}

    def moves(self) -> list[Move]:
        return [Move("resume_job")] if self.suspended and not self.world.ended else []

    def faults(self) -> list[Move]:
        free = self.world.state.phase not in (Phase.PAUSED, Phase.ENDED)
        return [Move("pause_job")] if free else []

    def pause_job(self) -> None:
        self.count += 1
        self._deliver_at_once(JobPauseRequested(job=JOB))

    def resume_job(self) -> None:
        self.suspended = False
        workers, newest = tuple(self.joined.values()), dict(self.newest)
        resumed = JobResumed(job=JOB, workers=workers, newest_incarnations=newest)
        self._deliver_at_once(resumed)

    def _deliver_at_once(self, event: RunEvent) -> None:
        """The session passes it on itself, and only once."""
        self.world.post("session", event)
        self.world.deliver(len(self.world.log) - 1)

    def note(self, event: RunEvent) -> bool:
        """Keep the session's workers; return False if the run doesn't get the event."""
        match event:
            case JobStarted():
                for info in event.workers:
                    self._join(info)
            case WorkerJoined():
                self._join(event.info)
            case WorkerLost():
                self._note(event.worker, event.incarnation)
                known = self.joined.get(event.worker)
                if known is not None and known.incarnation <= event.incarnation:
                    del self.joined[event.worker]
            case _:
                return True
        return not self.suspended

    def _join(self, info: WorkerInfo) -> None:
        if info.incarnation > self.newest.get(info.worker, -1):
            self.joined[info.worker] = info
            self._note(info.worker, info.incarnation)

    def _note(self, worker: WorkerId, incarnation: Incarnation) -> None:
        self.newest[worker] = max(incarnation, self.newest.get(worker, Incarnation(-1)))
