"""Latencies from workers' events to the commands that answer them."""

import time
from collections import Counter
from collections.abc import Iterable

from tlt.actors.event_outbox import Outbox, TakenPrompt
from tlt.actors.worker_context import IncarnationSetup
from tlt.id_types import WorkerId
from tlt.protocol.commands import (
    StartRollout,
    StopDrafterTraining,
    TrainDrafter,
    UpdatePolicy,
    WorkerCommand,
)
from tlt.protocol.events import (
    AnyEvent,
    DrafterTrainingStopped,
    PolicyPublished,
    PolicyUpdateFinished,
    RolloutScored,
    WorkerIdled,
)


class Latencies:
    """Seconds from the event that causes a command until a worker has read the command.

    An event begins when a worker gives it to its outbox, so the transaction that sends it counts.
    """

    def __init__(self) -> None:
        # of one worker's event, and of the last event of all workers
        self.to_one: list[float] = []
        self.to_all: list[float] = []
        self.counts: Counter[str] = Counter()
        self._own: dict[WorkerId, float] = {}
        self._last: dict[type[AnyEvent], float] = {}

    def note(self, event: AnyEvent) -> None:
        now = time.perf_counter()
        self.counts[type(event).__name__] += 1
        self._last[type(event)] = now
        if isinstance(event, WorkerIdled):
            self._own[event.worker] = now

    def read(self, command: WorkerCommand) -> None:
        now = time.perf_counter()
        match command:
            case TrainDrafter():
                if (since := self._own.pop(command.worker, None)) is not None:
                    self.to_one.append(now - since)
            case StopDrafterTraining():
                self._note_all(now, (RolloutScored,))
            case UpdatePolicy():
                self._own.pop(command.worker, None)
                self._note_all(now, (DrafterTrainingStopped, RolloutScored))
            case StartRollout():
                self._note_all(now, (PolicyUpdateFinished, PolicyPublished))
            case _:
                pass

    def _note_all(self, now: float, causes: Iterable[type[AnyEvent]]) -> None:
        if found := [self._last[cause] for cause in causes if cause in self._last]:
            self.to_all.append(now - max(found))


class TimedOutbox(Outbox):
    """Notes when each event is posted."""

    def __init__(self, setup: IncarnationSetup, latencies: Latencies) -> None:
        super().__init__(setup)
        self._latencies = latencies

    def post(self, event: AnyEvent, answered: TakenPrompt | None = None) -> None:
        self._latencies.note(event)
        super().post(event, answered)
