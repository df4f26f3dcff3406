"""Errors of the last ten minutes; older ones are no warning any more."""

from collections import deque
from typing import Literal

import msgspec

from tlt.base.id_types import WorkerId
from tlt.policies.run.run_state import RunState
from tlt.protocol.events import AnyEvent, DrafterDiverged, DrafterRefused, WorkerJoined, WorkerLost

_KEPT = 1000
_RECENT_SECONDS = 600.0


class RecentError(msgspec.Struct, frozen=True, kw_only=True):
    at: float
    kind: Literal["lost", "refused", "diverged"]
    worker: WorkerId
    error: str = ""


class RecentErrors:
    def __init__(self) -> None:
        self._all: deque[RecentError] = deque(maxlen=_KEPT)

    def add(self, before: RunState, event: AnyEvent, after: RunState, at: float) -> None:
        match event:
            case WorkerLost() if after.losses > before.losses:
                found = RecentError(at=at, kind="lost", worker=event.worker)
            case WorkerJoined() if after.losses > before.losses:
                found = RecentError(at=at, kind="lost", worker=event.info.worker)
            case DrafterRefused():
                found = RecentError(at=at, kind="refused", worker=event.worker, error=event.error)
            case DrafterDiverged():
                found = RecentError(at=at, kind="diverged", worker=event.worker, error=event.error)
            case _:
                return
        self._all.append(found)

    def recent(self, now: float) -> list[RecentError]:
        return [error for error in self._all if now - error.at <= _RECENT_SECONDS]
