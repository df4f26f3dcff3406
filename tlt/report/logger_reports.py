"""What loggers are told of a run: a report for each step that is over, and for each evaluation.

Reports are numbered from the journal's beginning. Folding it again gives the same ones, so that a
number says which of them somebody has had.
"""

import msgspec

from tlt.config import JobSpec
from tlt.ids import JobId, Step
from tlt.policies.job.run_state import Phase, RunState
from tlt.protocol.events import AnyEvent, JobStarted
from tlt.report.ledger import Ledger
from tlt.report.step_metrics import Figures, of_eval
from tlt.report.trace_spans import STEP, Span, Spans


class Report(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    # when the run did
    began: float
    step: Step
    at: float
    figures: dict[str, float]
    # those that ended since the report before
    spans: tuple[Span, ...]


class Reports:
    """Feed it a journal's entries in order."""

    def __init__(self, job: JobId, spec: JobSpec, *, traced: bool) -> None:
        self._ledger = Ledger(job, spec)
        self._figures = Figures()
        self._spans = Spans() if traced else None
        self._ended: list[Span] = []
        self._began = 0.0
        self._count = 0
        self._evals = 0

    @property
    def over(self) -> bool:
        """Nothing will be reported any more."""
        return self._ledger.ended

    def add(self, event: AnyEvent, at: float) -> list[Report]:
        if isinstance(event, JobStarted):
            self._began = at
        before = self._ledger.state
        commands = self._ledger.add(event, at)
        after = self._ledger.state
        self._figures.watch(before, event, after)
        if self._spans is not None:
            self._ended += self._spans.watch(before, event, after, commands, at)
        made: list[Report] = []
        if len(self._ledger.evals) > self._evals:
            self._evals += 1
            done = self._ledger.evals[-1]
            made.append(self._report(done.step, at, of_eval(done), ()))
        if _is_over(before, after):
            made.append(self._step(before.step, at))
        return made

    def _step(self, step: Step, at: float) -> Report:
        figures = self._figures.of_step(self._ledger, step)
        spans = tuple(_with_figures(span, figures) for span in self._ended)
        self._ended = []
        return self._report(step, at, figures, spans)

    def _report(
        self, step: Step, at: float, figures: dict[str, float], spans: tuple[Span, ...]
    ) -> Report:
        number, self._count = self._count, self._count + 1
        return Report(
            number=number, began=self._began, step=step, at=at, figures=figures, spans=spans
        )


def _is_over(before: RunState, after: RunState) -> bool:
    """The last one ends with the run, however far it came."""
    ends = after.phase is Phase.ENDED and before.phase is not Phase.ENDED
    return ends or after.step != before.step


def _with_figures(span: Span, figures: dict[str, float]) -> Span:
    if span.name != STEP:
        return span
    return msgspec.structs.replace(span, attributes={**span.attributes, **figures})
