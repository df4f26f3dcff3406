"""Programs can rely on the keys of summary.json and of the output of `--json`."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.key_tree import key_tree
from tlt.doctor.data_check.check_data import DataReport
from tlt.doctor.findings import Finding
from tlt.memory_plan import HostItem, MemoryPlan
from tlt.offline_drafter.training import CurvePoint
from tlt.protocol.shared_values import Heartbeat
from tlt.report import Snapshot
from tlt.report.summary import Summary
from tlt.session.fault_log import Fault
from tlt.session.session_process_states import Liveness
from tlt.simulation.comparison import Comparison
from tlt.spec.config import SessionSpec

_TREES = json.loads((Path(__file__).parent / "json_keys.json").read_bytes())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("summary.json", Summary),
        ("tlt ledger --json", Snapshot),
        ("tlt status --json: session", SessionSpec),
        ("tlt status --json: workers", Heartbeat),
        ("tlt status --json: processes", Liveness),
        ("tlt status --json: faults", Fault),
        ("tlt drafter train --json: curve", CurvePoint),
        ("tlt doctor --json: findings", Finding),
        ("tlt data check --json", DataReport),
        ("tlt doctor SPEC --json: plan", MemoryPlan),
        ("tlt doctor SPEC --json: host", HostItem),
        ("tlt simulate --json", Comparison),
    ],
)
def test_json_output_keeps_its_keys(name: str, kind: Any) -> None:
    assert key_tree(kind) == _TREES[name]
