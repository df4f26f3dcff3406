"""Latencies from workers' events to the commands that answer them."""

import time
from collections import Counter
from collections.abc import Iterable, Sequence

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
        # of one worker's, without what the simulation of all workers in one process adds: from
        # sending the event until the command is in its stream
        self.in_redis: list[float] = []
        self.to_all: list[float] = []
        self.counts: Counter[str] = Counter()
        self._own: dict[WorkerId, float] = {}
        # when it was sent, on Redis's clock
        self._sent: dict[WorkerId, float] = {}
        self._last: dict[type[AnyEvent], float] = {}

    def note(self, event: AnyEvent) -> None:
        now = time.perf_counter()
        self.counts[type(event).__name__] += 1
        self._last[type(event)] = now
        if isinstance(event, WorkerIdled):
            self._own[event.worker] = now

    def note_sent(self, worker: WorkerId) -> None:
        if worker in self._own:
            self._sent[worker] = time.time()

    def read(self, command: WorkerCommand, entry: str) -> None:
        now = time.perf_counter()
        match command:
            case TrainDrafter():
                if (since := self._own.pop(command.worker, None)) is not None:
                    self.to_one.append(now - since)
                    in_stream = int(entry.partition("-")[0]) / 1e3
                    self.in_redis.append(in_stream - self._sent.pop(command.worker))
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

    async def _sync_answers(self, events: Sequence[AnyEvent]) -> None:
        await super()._sync_answers(events)
        for event in events:
            if isinstance(event, WorkerIdled):
                self._latencies.note_sent(event.worker)
