"""Pure folds of a run's journal: dashboard, commands, loggers and benchmarks read the same ones."""

from tlt.report.acceptance import Acceptance, Positions
from tlt.report.attempts import Attempt, Attempts, WorkerIncarnation
from tlt.report.drafter_training import Decision, DrafterTraining
from tlt.report.evaluation_figures import EvalSummary, Gain, SetFigures
from tlt.report.ledger import Ledger
from tlt.report.ledger_figure_types import (
    Snapshot,
    StepAccount,
    StepSummary,
    StoredPolicy,
)
from tlt.report.reports_for_loggers import LoggerReport, LoggerReports
from tlt.report.strategy_usage import StrategyRow, StrategyUsage
from tlt.report.trace_spans import Span, TraceSpans
from tlt.report.transition import Transition
from tlt.report.worker_lanes import WorkerLanes

__all__ = [
    "Acceptance",
    "Attempt",
    "Attempts",
    "Decision",
    "DrafterTraining",
    "EvalSummary",
    "Gain",
    "Ledger",
    "LoggerReport",
    "LoggerReports",
    "Positions",
    "SetFigures",
    "Snapshot",
    "Span",
    "StepAccount",
    "StepSummary",
    "StoredPolicy",
    "StrategyRow",
    "StrategyUsage",
    "TraceSpans",
    "Transition",
    "WorkerIncarnation",
    "WorkerLanes",
]
