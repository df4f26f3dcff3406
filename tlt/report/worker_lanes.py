"""Each worker's duties, batch sizes and marks over time, sent to listeners as updates.

A lane is a list of changes: each lasts until its worker's next one. Only the newest entries of each
lane are kept, so that a long run of many workers takes bounded memory.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import chain
from typing import TypeVar

import msgspec

from tlt.base.human_format import name_strategy
from tlt.base.id_types import WorkerId
from tlt.policies.run.run_state import Phase
from tlt.protocol.events import DecodingReported, RolloutFinished
from tlt.report.duties import duty_changes
from tlt.report.happenings import Happenings
from tlt.report.transition import Transition

# after the last entry of a run
OVER = "over"
# kinds of happenings, by the kind of mark that shows them
_MARK_KINDS = {"failed": "lost"} | {
    kind: kind
    for kind in ("lost", "joined", "policy", "checkpoint", "eval", "step", "drafter", "speculation")
}
_Entry = TypeVar("_Entry")


class Change(msgspec.Struct, frozen=True, array_like=True):
    # the worker's index among the names
    worker: int
    at: float
    duty: str


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """The mean number of rows that a worker runs at once from a moment on."""

    worker: int
    at: float
    rows: float


class Mark(msgspec.Struct, frozen=True, array_like=True):
    at: float
    kind: str
    # None: it concerns all workers
    worker: int | None
    text: str


class LaneUpdate(msgspec.Struct, frozen=True, kw_only=True):
    # workers, by index, whose oldest changes were dropped: their first duty is unknown
    forgotten: tuple[int, ...]
    # all workers, or none if no worker is new
    names: tuple[WorkerId, ...]
    changes: tuple[Change, ...]
    batches: tuple[Batch, ...]
    marks: tuple[Mark, ...]


class WorkerLanes:
    """Feed it a run's transitions in order; `entries` and `marks` bound what it keeps."""

    def __init__(self, entries: int = 40_000, marks: int = 4_000) -> None:
        self._max_entries = entries
        self._numbers: dict[WorkerId, int] = {}
        # how many workers the updates have named
        self._named = 0
        self._duties: dict[WorkerId, str] = {}
        self._changes: list[deque[Change]] = []
        self._batches: list[deque[Batch]] = []
        # by kind, each with a serial number: strategies change far more often than steps begin
        self._marks: defaultdict[str, deque[tuple[int, Mark]]] = defaultdict(
            lambda: deque(maxlen=marks)
        )
        self._marked = 0
        self._forgotten: set[int] = set()
        self._strategies: dict[WorkerId, str] = {}
        self._happenings = Happenings()
        self._new_changes: list[Change] = []
        self._new_batches: list[Batch] = []
        self._new_marks: list[Mark] = []

    def add(self, transition: Transition, at: float) -> None:
        """Add a transition at `at` seconds after the run began."""
        for worker, duty in duty_changes(transition):
            self.change_duty(worker, duty, at)
        if transition.after.phase is Phase.ENDED and transition.enters_phase:
            for worker in self._numbers:
                self.change_duty(worker, OVER, at)
        self._add_batch_size(transition, at)
        for happening in self._happenings.of(transition):
            if (kind := _MARK_KINDS.get(happening.kind)) is not None:
                self.mark(kind, happening.worker, happening.text, at)

    def take_update(self) -> LaneUpdate:
        """Return what is new since the last call."""
        update = LaneUpdate(
            forgotten=(),  # listeners bound their memory themselves
            names=() if self._named == len(self._numbers) else tuple(self._numbers),
            changes=tuple(self._new_changes),
            batches=tuple(self._new_batches),
            marks=tuple(self._new_marks),
        )
        self._named = len(self._numbers)
        self._new_changes, self._new_batches, self._new_marks = [], [], []
        return update

    def all(self) -> LaneUpdate:
        """Return everything that is kept."""
        marks = heapq.merge(*self._marks.values(), key=lambda numbered: numbered[0])
        return LaneUpdate(
            forgotten=tuple(sorted(self._forgotten)),
            names=tuple(self._numbers),
            changes=tuple(chain.from_iterable(self._changes)),
            batches=tuple(chain.from_iterable(self._batches)),
            marks=tuple(mark for _, mark in marks),
        )

    def marks(self, kind: str) -> Sequence[Mark]:
        return [mark for _, mark in self._marks[kind]]

    def lane(self, worker: WorkerId) -> Sequence[Change]:
        return self._changes[self._numbers[worker]]

    def duties(self) -> dict[WorkerId, str]:
        return dict(self._duties)

    def change_duty(self, worker: WorkerId, duty: str, at: float) -> None:
        if self._duties.get(worker) == duty:
            return
        self._duties[worker] = duty
        number = self._number(worker)
        change = Change(number, at, duty)
        if self._append(self._changes[number], change):
            self._forgotten.add(number)
        self._new_changes.append(change)

    def mark(self, kind: str, worker: WorkerId | None, text: str, at: float) -> None:
        mark = Mark(at, kind, None if worker is None else self._number(worker), text)
        self._marked += 1
        self._marks[kind].append((self._marked, mark))
        self._new_marks.append(mark)

    def _number(self, worker: WorkerId) -> int:
        if worker not in self._numbers:
            self._numbers[worker] = len(self._numbers)
            self._changes.append(deque())
            self._batches.append(deque())
        return self._numbers[worker]

    def _append(self, lane: deque[_Entry], entry: _Entry) -> bool:
        """Return True if the oldest entry had to be dropped."""
        lane.append(entry)
        full = len(lane) > max(16, self._max_entries // len(self._numbers))
        if full:
            lane.popleft()
        return full

    def _add_batch_size(self, transition: Transition, at: float) -> None:
        if not transition.counts:
            return
        match event := transition.event:
            case DecodingReported():
                steps = sum(tally.steps for tally in event.tallies)
                if steps:
                    rows = sum(tally.rows for tally in event.tallies)
                    self._change_batch(event.worker, rows / steps, at)
                    self._change_strategy(event, at)
            case RolloutFinished():
                # without strategies to choose from there are no decoding reports
                if not transition.after.spec.speculation.arms:
                    self._change_batch(event.worker, float(event.batch), at)
            case _:
                pass

    def _change_batch(self, worker: WorkerId, rows: float, at: float) -> None:
        number = self._number(worker)
        batch = Batch(number, at, round(rows, 1))
        self._append(self._batches[number], batch)
        self._new_batches.append(batch)

    def _change_strategy(self, event: DecodingReported, at: float) -> None:
        """Mark a new preferred strategy; steps of control runs and exploration don't count."""
        chosen = [tally for tally in event.tallies if tally.control is None]
        if not chosen:
            return
        most = max(chosen, key=lambda tally: tally.steps - tally.explored)
        name = name_strategy(most.strategy)
        if self._strategies.get(event.worker) != name:
            self._strategies[event.worker] = name
            self.mark("strategy", event.worker, name, at)
