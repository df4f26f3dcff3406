"""What went wrong lately: a warning of an hour ago is none any more."""

from collections import deque
from typing import Literal

import msgspec

from tlt.messages import AnyEvent, DrafterRefused, DrafterSpoiled, WorkerJoined, WorkerLost
from tlt.policies.run_state import RunState
from tlt.types import WorkerId

_KEPT = 1000
_LATELY_SECONDS = 600.0


class Mishap(msgspec.Struct, frozen=True, kw_only=True):
    at: float
    kind: Literal["lost", "refused", "spoiled"]
    worker: WorkerId
    error: str = ""


class Mishaps:
    def __init__(self) -> None:
        self._all: deque[Mishap] = deque(maxlen=_KEPT)

    def watch(self, before: RunState, event: AnyEvent, after: RunState, at: float) -> None:
        match event:
            case WorkerLost() if after.losses > before.losses:
                found = Mishap(at=at, kind="lost", worker=event.worker)
            case WorkerJoined() if after.losses > before.losses:
                found = Mishap(at=at, kind="lost", worker=event.info.worker)
            case DrafterRefused():
                found = Mishap(at=at, kind="refused", worker=event.worker, error=event.error)
            case DrafterSpoiled():
                found = Mishap(at=at, kind="spoiled", worker=event.worker, error=event.error)
            case _:
                return
        self._all.append(found)

    def lately(self, now: float) -> list[Mishap]:
        return [mishap for mishap in self._all if now - mishap.at <= _LATELY_SECONDS]
