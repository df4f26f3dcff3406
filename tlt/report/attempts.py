"""How often a run was begun again: by which coordinator, and each life of its workers, and why.

An attempt is what one coordinator did of the run. The next takes over where the journal ends.
"""

from collections import deque

import msgspec

from tlt.ids import Epoch, Incarnation, Step, WorkerId
from tlt.policies.job.run_state import Phase, RunState
from tlt.protocol.events import AnyEvent, JobStarted, SessionResumed, WorkerJoined, WorkerLost
from tlt.protocol.records import WorkerInfo

# lives that are over
_KEPT = 500


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds are those since the run began."""

    epoch: Epoch
    began: float
    step: Step
    why: str
    # None: it goes on
    ended: float | None = None
    end: str | None = None


class Life(msgspec.Struct, frozen=True, kw_only=True):
    worker: WorkerId
    incarnation: Incarnation
    began: float
    ended: float | None = None
    end: str | None = None


class Attempts:
    def __init__(self) -> None:
        self.attempts: list[Attempt] = []
        self._going: dict[WorkerId, Life] = {}
        self._over: deque[Life] = deque(maxlen=_KEPT)
        self._heard = 0.0

    def watch(self, before: RunState, event: AnyEvent, after: RunState, at: float) -> None:
        match event:
            case JobStarted():
                self._begin(after, at, "the job was started")
                for info in event.workers:
                    self._join(info, at)
            case SessionResumed() if after.epoch != before.epoch:
                # what ended the one before is not heard of; its last entry is
                self._end(self._heard, "its coordinator ended")
                kept = "the coordinator was started again"
                self._begin(after, at, kept if event.blobs_kept else "the session came up again")
            case WorkerJoined() if after.newest_incarnations is not before.newest_incarnations:
                self._lose(event.info.worker, at, "fresh ranks took its place")
                self._join(event.info, at)
            case WorkerLost():
                life = self._going.get(event.worker)
                if life is not None and life.incarnation == event.incarnation:
                    self._lose(event.worker, at, event.reason)
            case _:
                pass
        if after.phase is Phase.ENDED and before.phase is not Phase.ENDED:
            self._end(at, "the job ended")
        self._heard = at

    def lives(self) -> tuple[Life, ...]:
        """Those that ended, or began later than the run: the newest first."""
        later = [life for life in self._going.values() if life.began > 0.0]
        return tuple(sorted((*self._over, *later), key=lambda life: -life.began))

    def _begin(self, state: RunState, at: float, why: str) -> None:
        self.attempts.append(Attempt(epoch=state.epoch, began=at, step=state.step, why=why))

    def _end(self, at: float, why: str) -> None:
        if self.attempts:
            last = self.attempts[-1]
            self.attempts[-1] = msgspec.structs.replace(last, ended=at, end=why)

    def _join(self, info: WorkerInfo, at: float) -> None:
        self._going[info.worker] = Life(worker=info.worker, incarnation=info.incarnation, began=at)

    def _lose(self, worker: WorkerId, at: float, why: str) -> None:
        life = self._going.pop(worker, None)
        if life is not None:
            self._over.append(msgspec.structs.replace(life, ended=at, end=why))
