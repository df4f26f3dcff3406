"""Latencies from workers' events to the commands that answer them."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from enum import IntEnum

from tlt.actors.worker.event_outbox import Outbox, TakenPrompt
from tlt.actors.worker.worker_context import IncarnationSetup
from tlt.base.id_types import EntryId, WorkerId
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


class _Kind(IntEnum):
    """The kind of an entry in Redis; of those of one millisecond, the event is first."""

    EVENT = 0
    COMMAND = 1
    OTHER_COMMAND = 2


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
        # Redis's time in milliseconds of the entries of a worker's events and commands; either may
        # be read first here
        self._entries: dict[WorkerId, list[tuple[int, _Kind]]] = defaultdict(list)
        self._last: dict[type[AnyEvent], float] = {}

    def note(self, event: AnyEvent) -> None:
        now = time.perf_counter()
        self.counts[type(event).__name__] += 1
        self._last[type(event)] = now
        if isinstance(event, WorkerIdled):
            self._own[event.worker] = now

    def note_stored(self, event: AnyEvent, entry: EntryId) -> None:
        if isinstance(event, WorkerIdled):
            self._note_entry(event.worker, entry, _Kind.EVENT)

    def read(self, command: WorkerCommand, entry: str) -> None:
        now = time.perf_counter()
        match command:
            case TrainDrafter():
                if (since := self._own.pop(command.worker, None)) is not None:
                    self.to_one.append(now - since)
                self._note_entry(command.worker, entry, _Kind.COMMAND)
            case StopDrafterTraining():
                self._note_all(now, (RolloutScored,))
            case UpdatePolicy():
                self._own.pop(command.worker, None)
                self._note_entry(command.worker, entry, _Kind.OTHER_COMMAND)
                self._note_all(now, (DrafterTrainingStopped, RolloutScored))
            case StartRollout():
                self._note_all(now, (PolicyUpdateFinished, PolicyPublished))
            case _:
                pass

    def in_redis(self) -> list[float]:
        """Return the seconds from one worker's events to their commands' entries in Redis.

        They don't contain what the simulation of all workers in one process adds.
        """
        found: list[float] = []
        for entries in self._entries.values():
            since: int | None = None
            for at, kind in sorted(entries):
                if kind is _Kind.COMMAND and since is not None:
                    found.append((at - since) / 1e3)
                since = at if kind is _Kind.EVENT else None
        return found

    def clear(self) -> None:
        """Forget what was measured so far."""
        self.to_one.clear()
        self.to_all.clear()
        self._entries.clear()

    def _note_entry(self, worker: WorkerId, entry: str, kind: _Kind) -> None:
        self._entries[worker].append((int(entry.partition("-")[0]), kind))

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
