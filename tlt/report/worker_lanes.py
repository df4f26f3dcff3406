"""Who did what when: the moments at which a worker's duty changed, and what happened between.

A lane is told in changes: each lasts until its worker's next. The newest of every lane are kept, so
that a long run of many workers has a bounded past.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TypeVar

import msgspec

from tlt.human_format import way
from tlt.ids import NAMED, DrafterVersion, WorkerId
from tlt.policies.job.run_state import Phase, RunState
from tlt.protocol.commands import AdoptDrafter, Command, GiveUpSpeculation, IssuePrompts
from tlt.protocol.events import (
    AnyEvent,
    CheckpointCommitted,
    DecodingReported,
    PolicyPublished,
    RolloutFinished,
    WorkerFailed,
    WorkerJoined,
    WorkerLost,
)
from tlt.report.time_by_duty import AWAY, duty_of

# after the last entry of a run
OVER = "over"
# of changes, and of batches, over all lanes; of marks of each kind
_KEPT = 40_000
_MARKS = 4_000
_Kept = TypeVar("_Kept")


class Change(msgspec.Struct, frozen=True, array_like=True):
    # by its number among the names
    worker: int
    at: float
    duty: str


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """From here on so many rows of a worker ran at once, on average."""

    worker: int
    at: float
    rows: float


class Mark(msgspec.Struct, frozen=True, array_like=True):
    at: float
    kind: str
    # None: of all
    worker: int | None
    text: str


class LaneNews(msgspec.Struct, frozen=True, kw_only=True):
    # of whom the oldest changes are gone, by number: their duty before the first is not known
    forgotten: tuple[int, ...]
    # all; none where nobody is new
    names: tuple[WorkerId, ...]
    changes: tuple[Change, ...]
    batches: tuple[Batch, ...]
    marks: tuple[Mark, ...]


class Lanes:
    def __init__(self) -> None:
        self._numbers: dict[WorkerId, int] = {}
        # how many of them the news told
        self._named = 0
        self._duties: dict[WorkerId, str] = {}
        self._changes: list[deque[Change]] = []
        self._batches: list[deque[Batch]] = []
        # by kind, each with its number: strategies change far more often than steps begin
        self._marks: defaultdict[str, deque[tuple[int, Mark]]] = defaultdict(
            lambda: deque(maxlen=_MARKS)
        )
        self._marked = 0
        self._forgotten: set[int] = set()
        self._ways: dict[WorkerId, str] = {}
        self._drafter: DrafterVersion | None = None
        self._new_changes: list[Change] = []
        self._new_batches: list[Batch] = []
        self._new_marks: list[Mark] = []

    def watch(
        self,
        before: RunState,
        event: AnyEvent,
        after: RunState,
        commands: Sequence[Command],
        at: float,
    ) -> None:
        known = (
            after.workers is before.workers
            and after.newest_incarnations is before.newest_incarnations
        )
        if not known or after.phase is not before.phase:
            self._follow_duties(before, after, at)
        if after.phase is Phase.ENDED and before.phase is not Phase.ENDED:
            for worker in self._numbers:
                self._change(worker, OVER, at)
        self._note_event(before, event, after, at)
        for command in commands:
            self._note_command(command, at)

    def news(self) -> LaneNews:
        """Since it was last asked for."""
        # who listens forgets by itself
        news = self._told(self._new_changes, self._new_batches, self._new_marks, ())
        if self._named == len(self._numbers):
            news = msgspec.structs.replace(news, names=())
        self._named = len(self._numbers)
        self._new_changes, self._new_batches, self._new_marks = [], [], []
        return news

    def all(self) -> LaneNews:
        marks = heapq.merge(*self._marks.values(), key=lambda numbered: numbered[0])
        return self._told(
            chain.from_iterable(self._changes),
            chain.from_iterable(self._batches),
            (mark for _, mark in marks),
            sorted(self._forgotten),
        )

    def marks(self, kind: str) -> Sequence[Mark]:
        return [mark for _, mark in self._marks[kind]]

    def lane(self, worker: WorkerId) -> Sequence[Change]:
        return self._changes[self._numbers[worker]]

    def duties(self) -> dict[WorkerId, str]:
        return dict(self._duties)

    def _told(
        self,
        changes: Iterable[Change],
        batches: Iterable[Batch],
        marks: Iterable[Mark],
        forgotten: Iterable[int],
    ) -> LaneNews:
        return LaneNews(
            forgotten=tuple(forgotten),
            names=tuple(self._numbers),
            changes=tuple(changes),
            batches=tuple(batches),
            marks=tuple(marks),
        )

    def _follow_duties(self, before: RunState, after: RunState, at: float) -> None:
        was = before.workers
        for worker, known in after.workers.items():
            if was.get(worker) is not known or after.phase is not before.phase:
                self._change(worker, duty_of(after, known), at)
        for worker in was.keys() - after.workers.keys():
            self._change(worker, AWAY, at)

    def _change(self, worker: WorkerId, duty: str, at: float) -> None:
        if self._duties.get(worker) == duty:
            return
        self._duties[worker] = duty
        number = self._number(worker)
        change = Change(number, at, duty)
        if self._keep(self._changes[number], change):
            self._forgotten.add(number)
        self._new_changes.append(change)

    def _number(self, worker: WorkerId) -> int:
        if worker not in self._numbers:
            self._numbers[worker] = len(self._numbers)
            self._changes.append(deque())
            self._batches.append(deque())
        return self._numbers[worker]

    def _keep(self, lane: deque[_Kept], entry: _Kept) -> bool:
        """Whether the oldest had to go."""
        lane.append(entry)
        full = len(lane) > max(16, _KEPT // len(self._numbers))
        if full:
            lane.popleft()
        return full

    def _note_event(self, before: RunState, event: AnyEvent, after: RunState, at: float) -> None:
        match event:
            case DecodingReported() if after.decode_costs is not before.decode_costs:
                rounds = sum(tally.steps for tally in event.tallies)
                if rounds:
                    rows = sum(tally.rows for tally in event.tallies)
                    self._batch(event.worker, rows / rounds, at)
                    self._strategy(event, at)
            case RolloutFinished() if after.batch is not before.batch:
                # without anything to choose between nobody says how many run
                if not after.spec.speculation.arms and event.batches:
                    self._batch(event.worker, float(event.batches[-1].size), at)
            case WorkerLost() if after.workers is not before.workers:
                self._mark("lost", event.worker, f"lost: {event.reason}", at)
            case WorkerJoined() if after.workers is not before.workers:
                self._mark("joined", event.info.worker, "joined", at)
            case WorkerFailed():
                self._mark("lost", event.worker, f"cannot run it: {event.error}", at)
            case PolicyPublished() if after.version != before.version:
                self._mark("policy", None, f"policy {after.version}", at)
            case CheckpointCommitted():
                self._mark("checkpoint", None, f"checkpoint {event.checkpoint.version}", at)
            case _:
                pass

    def _note_command(self, command: Command, at: float) -> None:
        match command:
            case IssuePrompts(purpose="eval"):
                self._mark("eval", None, "evaluation", at)
            case IssuePrompts():
                self._mark("step", None, f"step {command.step}", at)
            case AdoptDrafter():
                self._adopt(NAMED if command.drafter is None else command.drafter.version, at)
            case GiveUpSpeculation():
                self._mark("off", None, "speculation given up", at)
            case _:
                pass

    def _adopt(self, version: DrafterVersion, at: float) -> None:
        """Every worker is told, and it is marked once."""
        if version != self._drafter:
            self._drafter = version
            self._mark("drafter", None, f"drafter {version} in use", at)

    def _batch(self, worker: WorkerId, rows: float, at: float) -> None:
        number = self._number(worker)
        batch = Batch(number, at, round(rows, 1))
        self._keep(self._batches[number], batch)
        self._new_batches.append(batch)

    def _strategy(self, event: DecodingReported, at: float) -> None:
        """Of what was thought best, not tried: what most rounds decoded with."""
        chosen = [tally for tally in event.tallies if tally.control is None]
        if not chosen:
            return
        most = max(chosen, key=lambda tally: tally.steps - tally.explored)
        name = way(most.strategy)
        if self._ways.get(event.worker) != name:
            self._ways[event.worker] = name
            self._mark("strategy", event.worker, name, at)

    def _mark(self, kind: str, worker: WorkerId | None, text: str, at: float) -> None:
        mark = Mark(at, kind, None if worker is None else self._number(worker), text)
        self._marked += 1
        self._marks[kind].append((self._marked, mark))
        self._new_marks.append(mark)
