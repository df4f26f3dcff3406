"""Simulate what the session does when a job is paused and goes on, and when it loses a worker."""

from typing import TYPE_CHECKING

from tests.simulation.moves import Move
from tests.simulation.worker_events import JOB
from tlt.base.id_types import Incarnation, WorkerId
from tlt.policies.run.run_state import Phase
from tlt.protocol.commands import ContinueJob, PauseJob, StartJob
from tlt.protocol.events import RunEvent, WorkerJoined, WorkerLost, WorkerReplaced
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
        found = [Move("pause_job")] if free else []
        lost = sorted(w for w in self.world.starting if self._is_lost(w))
        others = len(self.world.starting | self.world.incarnations.keys()) > 1
        return found + [Move("serve_another", (worker,)) for worker in lost if others]

    def _is_lost(self, worker: WorkerId) -> bool:
        """Return True if the run has had the worker, and knows that it is lost."""
        state = self.world.state
        untold = any(
            isinstance(posted.event, WorkerLost) and posted.event.worker == worker
            for posted in self.world.log
        )
        had = worker in state.newest_incarnations and worker not in state.workers
        return had and not untold and not self.suspended

    def serve_another(self, worker: WorkerId) -> None:
        """Let a lost worker come back to another job, because the others suffice for this one."""
        self.world.starting.discard(worker)
        del self.world.ranks[worker]
        self.newest.pop(worker, None)
        self.joined.pop(worker, None)
        self._deliver_at_once(WorkerReplaced(job=JOB, worker=worker))
        self._withhold_events()

    def _withhold_events(self) -> None:
        """Send the run no joins and losses again of workers that it doesn't know any more."""
        known = self.world.state.newest_incarnations
        self.world.delivered = [
            event
            for event in self.world.delivered
            if not (isinstance(event, WorkerJoined) and event.info.worker not in known)
            and not (isinstance(event, WorkerLost) and event.worker not in known)
        ]

    def pause_job(self) -> None:
        self.count += 1
        self._deliver_at_once(PauseJob(job=JOB))

    def resume_job(self) -> None:
        self.suspended = False
        workers, newest = tuple(self.joined.values()), dict(self.newest)
        resumed = ContinueJob(job=JOB, workers=workers, newest_incarnations=newest)
        self._deliver_at_once(resumed)
        self._withhold_events()

    def _deliver_at_once(self, event: RunEvent) -> None:
        """The session passes it on itself, and only once."""
        self.world.post("session", event)
        self.world.deliver(len(self.world.log) - 1)

    def note(self, event: RunEvent) -> bool:
        """Keep the session's workers; return False if the run doesn't get the event."""
        match event:
            case StartJob():
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
