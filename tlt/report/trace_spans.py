"""Show a run as spans of time: the job, its steps, their phases, and the duties of each worker.

Spans are numbered in the order in which they begin, so that folding a journal again gives the same
numbers. A duty that continues into the next step is two spans, so that each has one parent.
"""

from collections.abc import Iterator, Sequence

import msgspec

from tlt.base.id_types import WorkerId
from tlt.policies.run.run_state import Duty, Phase, RunState
from tlt.protocol.commands import Command, EndJob
from tlt.protocol.events import DrafterMerged, PolicyPublished, WorkerLost
from tlt.report.duties import WAITING_FOR_WEIGHTS, duty_changes
from tlt.report.happenings import Happenings
from tlt.report.transition import Transition

JOB, STEP, PUBLISHING, MERGING = "job", "step", "publishing", "merging"
_MOMENTS = ("resumed", "lost", "checkpoint", "drafter", "decision", "speculation")
_UNMARKED_DUTIES = (Duty.IDLE.value, WAITING_FOR_WEIGHTS)


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened within a span."""

    at: float
    name: str


class Span(msgspec.Struct, kw_only=True):
    number: int
    # None: the span of the job itself
    parent: int | None
    name: str
    begin: float
    # set when the span is closed
    end: float
    # None: the span belongs to the whole job
    worker: WorkerId | None = None
    attributes: dict[str, str | int | float | bool] = {}
    moments: list[Moment] = []
    error: str | None = None


class TraceSpans:
    """Feed it a run's transitions in order."""

    def __init__(self) -> None:
        self._count = 0
        # the latest time so far: the clocks of two coordinators may differ
        self._now = 0.0
        self._job: Span | None = None
        self._step: Span | None = None
        self._phase: Span | None = None
        self._publishing: Span | None = None
        self._duty_spans: dict[WorkerId, Span] = {}
        self._duties: dict[WorkerId, str] = {}
        self._happenings = Happenings()

    def add(self, transition: Transition) -> list[Span]:
        """Return the spans that ended, parents after their children."""
        before, after = transition.before, transition.after
        self._now = max(self._now, transition.at)
        if before.phase is Phase.STARTING and after.phase is not Phase.STARTING:
            self._job = self._begin(JOB, None)
            self._job.attributes = {"job": after.job, "steps": after.spec.algorithm.steps}
        if self._job is None:
            return []
        self._add_moments(transition)
        if after.phase is Phase.ENDED:
            return list(self._end(transition.commands))
        return list(self._follow(transition))

    def open_spans(self) -> list[Span]:
        """Return copies of the spans that continue, as if they ended now."""
        parents = (self._publishing, self._phase, self._step, self._job)
        spans = (*self._duty_spans.values(), *(span for span in parents if span is not None))
        return [msgspec.structs.replace(span, end=self._now) for span in spans]

    def _follow(self, transition: Transition) -> Iterator[Span]:
        after = transition.after
        new_step = self._step is None or after.step != transition.before.step
        if new_step:
            yield from self._close_step()
            self._step = self._begin(STEP, self._job)
            self._step.attributes = {"step": after.step, "policy": after.policy.version}
        elif transition.enters_phase:
            yield from self._close_phase()
        if new_step or transition.enters_phase:
            self._phase = self._begin(after.phase.value, self._step)
        if isinstance(transition.event, PolicyPublished) and transition.counts:
            yield from self._follow_publishing(after)
        changes = dict(duty_changes(transition))
        for worker, duty in ({**self._duties, **changes} if new_step else changes).items():
            yield from self._follow_duty(worker, duty, after, new_step)
        if isinstance(transition.event, DrafterMerged) and transition.counts:
            yield self._merging(transition.event)

    def _begin(self, name: str, parent: Span | None) -> Span:
        number, self._count = self._count, self._count + 1
        return Span(
            number=number,
            parent=None if parent is None else parent.number,
            name=name,
            begin=self._now,
            end=self._now,
        )

    def _close(self, *spans: Span | None) -> Iterator[Span]:
        for span in spans:
            if span is not None:
                span.end = self._now
                yield span

    def _close_phase(self) -> Iterator[Span]:
        yield from self._close(self._publishing, self._phase)
        self._publishing = self._phase = None

    def _close_step(self) -> Iterator[Span]:
        yield from self._close(*self._duty_spans.values())
        self._duty_spans = {}
        yield from self._close_phase()
        yield from self._close(self._step)
        self._step = None

    def _follow_publishing(self, state: RunState) -> Iterator[Span]:
        """Open a span that lasts until every worker decodes with the new policy."""
        yield from self._close(self._publishing)
        self._publishing = None
        if state.phase is Phase.POLICY_UPDATE:
            self._publishing = self._begin(PUBLISHING, self._phase)
            self._publishing.attributes = {"policy": state.policy.version}

    def _end(self, commands: Sequence[Command]) -> Iterator[Span]:
        yield from self._close_step()
        job, self._job = self._job, None
        for command in commands:
            if job is not None and isinstance(command, EndJob):
                job.attributes["status"] = command.status
                job.error = command.error or (command.status if command.status != "done" else None)
        yield from self._close(job)

    def _follow_duty(
        self, worker: WorkerId, duty: str, state: RunState, new_step: bool
    ) -> Iterator[Span]:
        if self._duties.get(worker) == duty and not new_step:
            return
        self._duties[worker] = duty
        yield from self._close(self._duty_spans.pop(worker, None))
        if duty in _UNMARKED_DUTIES:
            return
        span = self._duty_spans[worker] = self._begin(duty, self._step)
        span.worker = worker
        span.attributes = {"worker": worker, "phase": state.phase.value}
        known = state.workers.get(worker)
        if known is not None:
            span.attributes["incarnation"] = known.info.incarnation

    def _merging(self, event: DrafterMerged) -> Span:
        """Return the span of a merge, which is reported when it is over."""
        span = self._begin(MERGING, self._step)
        span.begin = self._now - event.seconds
        if self._step is not None:
            span.begin = max(self._step.begin, span.begin)
        span.attributes = {
            "worker": event.worker,
            "drafter": event.drafter.version,
        }
        if event.evaluation.answers:
            span.attributes["accept_length"] = event.evaluation.accept_length
        return span

    def _add_moments(self, transition: Transition) -> None:
        event, span = transition.event, self._step or self._job
        if isinstance(event, WorkerLost) and transition.counts:
            lost = self._duty_spans.get(event.worker)
            if lost is not None:
                lost.error = event.reason
        for happening in self._happenings.of(transition):
            if happening.kind in _MOMENTS and span is not None:
                worker = "" if happening.worker is None else f"{happening.worker} "
                span.moments.append(Moment(at=self._now, name=f"{worker}{happening.text}"))
