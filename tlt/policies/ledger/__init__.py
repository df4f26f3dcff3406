"""What a run was like, folded from its journal: dashboard, CLI and benchmarks read one ledger."""

from tlt.policies.ledger.attempts import Attempt, Attempts, Life
from tlt.policies.ledger.drafted import Decision, Drafting
from tlt.policies.ledger.fold import Ledger
from tlt.policies.ledger.lanes import Lanes
from tlt.policies.ledger.reports import Report, Reports
from tlt.policies.ledger.snapshot import (
    Acceptance,
    EvalSummary,
    Kept,
    Positions,
    Snapshot,
    StepAccount,
    StepSummary,
)
from tlt.policies.ledger.spans import Span, Spans
from tlt.policies.ledger.ways import Way, Ways

__all__ = [
    "Acceptance",
    "Attempt",
    "Attempts",
    "Decision",
    "Drafting",
    "EvalSummary",
    "Kept",
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
    "Way",
    "Ways",
]
