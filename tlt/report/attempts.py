"""The attempts of a run's coordinators, and the incarnations of its workers.

An attempt is one coordinator's part of the run. The next one continues where the journal ends.
"""

from collections import deque

import msgspec

from tlt.base.id_types import Epoch, Incarnation, Step, WorkerId
from tlt.policies.run.run_state import Phase, RunState
from tlt.protocol.commands import ContinueJob, StartJob
from tlt.protocol.events import SessionResumed, WorkerJoined, WorkerLost
from tlt.protocol.shared_values import WorkerInfo
from tlt.report.transition import Transition

_MAX_ENDED_INCARNATIONS = 500


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """Times are in seconds since the run began; `ended` is None while it lasts."""

    epoch: Epoch
    began: float
    step: Step
    why: str
    ended: float | None = None
    end: str | None = None


class WorkerIncarnation(msgspec.Struct, frozen=True, kw_only=True):
    worker: WorkerId
    incarnation: Incarnation
    began: float
    ended: float | None = None
    end: str | None = None


class Attempts:
    """Feed it a run's transitions in order."""

    def __init__(self) -> None:
        self.attempts: list[Attempt] = []
        self._current: dict[WorkerId, WorkerIncarnation] = {}
        self._ended: deque[WorkerIncarnation] = deque(maxlen=_MAX_ENDED_INCARNATIONS)
        self._last_entry = 0.0

    def add(self, transition: Transition, at: float) -> None:
        """Add a transition at `at` seconds after the run began."""
        before, after = transition.before, transition.after
        match event := transition.event:
            case StartJob():
                self._begin(after, at, "the job was started")
                for info in event.workers:
                    self._join(info, at)
            case SessionResumed() if after.epoch != before.epoch:
                # the journal does not say when the coordinator before ended
                self._end(self._last_entry, "its coordinator ended")
                restarted = "the coordinator was started again"
                self._begin(after, at, restarted if event.blobs_kept else "the session restarted")
            case ContinueJob():
                # those that joined while it was paused
                for info in event.workers:
                    self._replace(info, at)
            case WorkerJoined() if transition.counts:
                self._replace(event.info, at)
            case WorkerLost():
                current = self._current.get(event.worker)
                if current is not None and current.incarnation == event.incarnation:
                    self._lose(event.worker, at, event.reason)
            case _:
                pass
        if after.phase is Phase.ENDED and transition.enters_phase:
            self._end(at, "the job ended")
        self._last_entry = at

    def incarnations(self) -> tuple[WorkerIncarnation, ...]:
        """Return those that ended, or that began later than the run, newest first."""
        later = [current for current in self._current.values() if current.began > 0.0]
        return tuple(sorted((*self._ended, *later), key=lambda each: -each.began))

    def _begin(self, state: RunState, at: float, why: str) -> None:
        self.attempts.append(Attempt(epoch=state.epoch, began=at, step=state.step, why=why))

    def _end(self, at: float, why: str) -> None:
        if self.attempts:
            self.attempts[-1] = msgspec.structs.replace(self.attempts[-1], ended=at, end=why)

    def _join(self, info: WorkerInfo, at: float) -> None:
        self._current[info.worker] = WorkerIncarnation(
            worker=info.worker, incarnation=info.incarnation, began=at
        )

    def _replace(self, info: WorkerInfo, at: float) -> None:
        current = self._current.get(info.worker)
        if current is None or current.incarnation != info.incarnation:
            self._lose(info.worker, at, "fresh ranks took its place")
            self._join(info, at)

    def _lose(self, worker: WorkerId, at: float, why: str) -> None:
        current = self._current.pop(worker, None)
        if current is not None:
            self._ended.append(msgspec.structs.replace(current, ended=at, end=why))
