"""`tlt demo` with a short job reports and leaves only the run's folder."""

import json
from pathlib import Path

import pytest

from tests.e2e.live import Live, processes_of

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


def test_demo_reports_and_cleans_up(tmp_path: Path, spec: Path) -> None:
    alone = Live(tmp_path)
    result = alone.tlt("demo", "--spec", str(spec), "--workers", "1", "--runs", str(alone.runs))
    (run,) = alone.runs.iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "done"
    assert summary["steps"] == 2
    assert summary["eval_problems"] == 8
    assert {"eval_before", "eval_after", "eval_before_stderr", "seconds"} <= summary.keys()
    assert set(summary["phases"]) == {"evaluating", "rollout", "policy_update"}
    assert (run / "progress.png").read_bytes().startswith(b"\x89PNG")
    for line in ("seconds by phase", "seconds by duty", "held-out reward:", "reward  ", "length  "):
        assert line in result.stdout
    assert (run / "logs" / "coordinator.jsonl").exists()
    assert processes_of(alone) == []
