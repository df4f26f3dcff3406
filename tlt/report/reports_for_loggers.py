"""The reports that loggers get of a run: one for each step that ended, one for each evaluation.

Reports are numbered from the journal's beginning. Folding it again gives the same ones, so that a
number says which reports a logger has received.
"""

from collections.abc import Iterator

import msgspec

from tlt.base.id_types import JobId, Step
from tlt.policies.run.run_state import Phase
from tlt.protocol.events import AnyEvent
from tlt.report.ledger import Ledger
from tlt.report.step_metrics import StepMetrics, eval_metrics
from tlt.report.trace_spans import STEP, Span, TraceSpans
from tlt.report.transition import Transition
from tlt.spec.config import JobSpec


class LoggerReport(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    # when the run began
    began: float
    step: Step
    at: float
    figures: dict[str, float]
    # those that ended since the report before
    spans: tuple[Span, ...]


class LoggerReports:
    """Feed it a journal's entries in order."""

    def __init__(self, job: JobId, spec: JobSpec, *, traced: bool) -> None:
        self._ledger = Ledger(job, spec)
        self._metrics = StepMetrics()
        self._spans = TraceSpans() if traced else None
        self._ended_spans: list[Span] = []
        self._count = 0
        self._evals = 0

    @property
    def over(self) -> bool:
        """Return True if there will be no more reports."""
        return self._ledger.ended

    def add(self, event: AnyEvent, at: float) -> Iterator[LoggerReport]:
        transition = self._ledger.add(event, at)
        if self._spans is not None:
            self._ended_spans += self._spans.add(transition)
        if len(self._ledger.evals) > self._evals:
            self._evals += 1
            summary = self._ledger.evals[-1]
            yield self._report(summary.step, at, eval_metrics(summary), ())
        if _ends_step(transition):
            yield self._step_report(transition.before.step, at)

    def _step_report(self, step: Step, at: float) -> LoggerReport:
        figures = self._metrics.of_step(self._ledger, step)
        spans, self._ended_spans = tuple(self._ended_spans), []
        for span in spans:
            if span.name == STEP:
                span.attributes |= figures
        return self._report(step, at, figures, spans)

    def _report(
        self, step: Step, at: float, figures: dict[str, float], spans: tuple[Span, ...]
    ) -> LoggerReport:
        number, self._count = self._count, self._count + 1
        began = self._ledger.began or 0.0
        return LoggerReport(
            number=number, began=began, step=step, at=at, figures=figures, spans=spans
        )


def _ends_step(transition: Transition) -> bool:
    """Return True if a step ended; the run's end also ends its last step, however far it got."""
    before, after = transition.before, transition.after
    run_ends = after.phase is Phase.ENDED and transition.enters_phase
    return run_ends or after.step != before.step
