"""A run as spans of time: the job, its steps, their phases, and what each worker did meanwhile.

They are numbered in the order in which they began, so that whoever folds the journal again gives
them the same numbers. A duty that goes on into the next step is two spans: each has one parent.
"""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from tlt.ids import NAMED, DrafterVersion, WorkerId
from tlt.policies.job.run_state import Duty, Phase, RunState, WorkerState
from tlt.protocol.commands import (
    AdoptDrafter,
    Command,
    ExplainDrafterDecision,
    FinishRun,
    GiveUpSpeculation,
)
from tlt.protocol.events import (
    AnyEvent,
    CheckpointCommitted,
    DrafterMerged,
    PolicyPublished,
    SessionResumed,
    WorkerLost,
)
from tlt.report.time_by_duty import AWAY

JOB, STEP, PUBLISHING, MERGING = "job", "step", "publishing", "merging"
_Value = str | int | float | bool


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened within a span."""

    at: float
    name: str


class Span(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    # None: of the job
    parent: int | None
    name: str
    begin: float
    end: float
    # None: of the job as a whole
    worker: WorkerId | None = None
    attributes: dict[str, _Value] = {}
    moments: tuple[Moment, ...] = ()
    error: str | None = None


class _Open:
    def __init__(self, number: int, parent: int | None, name: str, begin: float) -> None:
        self.number = number
        self.parent = parent
        self.name = name
        self.begin = begin
        self.worker: WorkerId | None = None
        self.attributes: dict[str, _Value] = {}
        self.moments: list[Moment] = []
        self.error: str | None = None

    def closed(self, end: float) -> Span:
        return Span(
            number=self.number,
            parent=self.parent,
            name=self.name,
            begin=self.begin,
            end=end,
            worker=self.worker,
            attributes=self.attributes,
            moments=tuple(self.moments),
            error=self.error,
        )


class Spans:
    def __init__(self) -> None:
        self._count = 0
        # the latest time that was heard: clocks of two coordinators may differ
        self._now = 0.0
        self._job: _Open | None = None
        self._step: _Open | None = None
        self._phase: _Open | None = None
        self._publishing: _Open | None = None
        self._duties: dict[WorkerId, _Open] = {}
        self._drafter: DrafterVersion | None = None

    def watch(
        self,
        before: RunState,
        event: AnyEvent,
        after: RunState,
        commands: Sequence[Command],
        at: float,
    ) -> list[Span]:
        """Those that ended, parents after their children."""
        self._now = max(self._now, at)
        if before.phase is Phase.STARTING and after.phase is not Phase.STARTING:
            self._job = self._begin(JOB, None)
            self._job.attributes = {"job": after.job, "steps": after.spec.algorithm.steps}
        if self._job is None:
            return []
        self._note(before, event, after, commands)
        closed = list(self._close_lost(before, event, after))
        if after.phase is Phase.ENDED:
            return [*closed, *self._end(commands)]
        opens = self._step is None or after.step != before.step
        if opens:
            closed += self._close_step()
            self._open_step(after)
        elif after.phase is not before.phase:
            closed += self._close_phase()
            self._open_phase(after)
        if isinstance(event, PolicyPublished) and after.version > before.version:
            closed += self._publish(after)
        if (
            opens
            or after.workers is not before.workers
            or after.newest_incarnations is not before.newest_incarnations
        ):
            closed += self._follow_duties({} if opens else before.workers, after)
        if isinstance(event, DrafterMerged) and after.drafter is not before.drafter:
            closed.append(self._merged(event))
        return closed

    def open(self) -> list[Span]:
        """Those that go on, as if they ended now."""
        parents = (self._publishing, self._phase, self._step, self._job)
        going = (*self._duties.values(), *(span for span in parents if span is not None))
        return [span.closed(self._now) for span in going]

    def _begin(self, name: str, parent: _Open | None) -> _Open:
        span = _Open(self._count, None if parent is None else parent.number, name, self._now)
        self._count += 1
        return span

    # --- the job, its steps and phases

    def _open_step(self, state: RunState) -> None:
        self._step = self._begin(STEP, self._job)
        self._step.attributes = {"step": state.step, "policy": state.version}
        self._open_phase(state)

    def _open_phase(self, state: RunState) -> None:
        self._phase = self._begin(state.phase.value, self._step)

    def _close_phase(self) -> Iterator[Span]:
        for span in (self._publishing, self._phase):
            if span is not None:
                yield span.closed(self._now)
        self._publishing = self._phase = None

    def _close_step(self) -> Iterator[Span]:
        for duty in self._duties.values():
            yield duty.closed(self._now)
        self._duties = {}
        yield from self._close_phase()
        if self._step is not None:
            yield self._step.closed(self._now)
        self._step = None

    def _publish(self, state: RunState) -> Iterator[Span]:
        """Until every worker decodes with it."""
        if self._publishing is not None:
            yield self._publishing.closed(self._now)
        self._publishing = None
        if state.phase is Phase.POLICY_UPDATE:
            self._publishing = self._begin(PUBLISHING, self._phase)
            self._publishing.attributes = {"policy": state.version}

    def _end(self, commands: Sequence[Command]) -> Iterator[Span]:
        yield from self._close_step()
        job, self._job = self._job, None
        if job is None:
            return
        for command in commands:
            if isinstance(command, FinishRun):
                job.attributes["status"] = command.status
                job.error = command.error or (command.status if command.status != "done" else None)
        yield job.closed(self._now)

    # --- the workers

    def _close_lost(self, before: RunState, event: AnyEvent, after: RunState) -> Iterator[Span]:
        if not isinstance(event, WorkerLost) or after.workers is before.workers:
            return
        span = self._duties.pop(event.worker, None)
        if span is not None:
            span.error = event.reason
            yield span.closed(self._now)

    def _follow_duties(
        self, was: Mapping[WorkerId, WorkerState], state: RunState
    ) -> Iterator[Span]:
        for worker in state.newest_incarnations:
            known = state.workers.get(worker)
            if known is not None and was.get(worker) is known:
                continue
            duty = AWAY if known is None else known.duty.value
            span = self._duties.get(worker)
            if span is not None and span.name == duty:
                continue
            if span is not None:
                del self._duties[worker]
                yield span.closed(self._now)
            if duty != Duty.IDLE:
                self._open_duty(worker, duty, state)

    def _open_duty(self, worker: WorkerId, duty: str, state: RunState) -> None:
        span = self._duties[worker] = self._begin(duty, self._step)
        span.worker = worker
        span.attributes = {"worker": worker, "phase": state.phase.value}
        known = state.workers.get(worker)
        if known is not None:
            span.attributes["incarnation"] = known.info.incarnation

    def _merged(self, event: DrafterMerged) -> Span:
        """It is heard of when it is over."""
        span = self._begin(MERGING, self._step)
        span.begin = self._now - event.seconds
        if self._step is not None:
            span.begin = max(self._step.begin, span.begin)
        span.attributes = {
            "worker": event.worker,
            "drafter": event.drafter.version,
            "canary": event.evaluation.trained,
        }
        return span.closed(self._now)

    # --- what happened meanwhile

    def _note(
        self, before: RunState, event: AnyEvent, after: RunState, commands: Sequence[Command]
    ) -> None:
        match event:
            case SessionResumed():
                self._moment(f"the coordinator took over (epoch {event.epoch})")
            case WorkerLost() if after.workers is not before.workers:
                self._moment(f"{event.worker} lost: {event.reason}")
            case CheckpointCommitted():
                self._moment(f"checkpoint {event.checkpoint.version}")
            case _:
                pass
        for command in commands:
            match command:
                case AdoptDrafter():
                    self._adopt(NAMED if command.drafter is None else command.drafter.version)
                case ExplainDrafterDecision():
                    self._moment(f"drafter, {command.what}: {command.why}")
                case GiveUpSpeculation():
                    self._moment("speculation given up")
                case _:
                    pass

    def _adopt(self, version: DrafterVersion) -> None:
        """Every worker is told, and it is noted once."""
        if version != self._drafter:
            self._drafter = version
            self._moment(f"drafter {version} in use")

    def _moment(self, name: str) -> None:
        span = self._step or self._job
        if span is not None:
            span.moments.append(Moment(at=self._now, name=name))
