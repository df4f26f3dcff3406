"""What a run was like, folded from its journal: dashboard, CLI and benchmarks read one ledger."""

from tlt.report.attempts import Attempt, Attempts, Life
from tlt.report.drafter_training import Decision, Drafting
from tlt.report.ledger import Ledger
from tlt.report.logger_reports import Report, Reports
from tlt.report.run_summary import (
    Acceptance,
    EvalSummary,
    Positions,
    Snapshot,
    StepAccount,
    StepSummary,
    StoredPolicy,
)
from tlt.report.strategy_usage import Way, Ways
from tlt.report.trace_spans import Span, Spans
from tlt.report.worker_lanes import Lanes

__all__ = [
    "Acceptance",
    "Attempt",
    "Attempts",
    "Decision",
    "Drafting",
    "EvalSummary",
    "Lanes",
    "Ledger",
    "Life",
    "Positions",
    "Report",
    "Reports",
    "Snapshot",
    "Span",
    "Spans",
    "StepAccount",
    "StepSummary",
    "StoredPolicy",
    "Way",
    "Ways",
]
