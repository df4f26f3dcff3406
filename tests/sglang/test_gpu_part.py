"""The acceptance's part about SGLang passes on a CPU, before a GPU runs it."""

from pathlib import Path

import pytest

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.outcomes import Outcomes
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.supervisor import Supervisor, memory_folder

pytestmark = pytest.mark.sglang
_SECONDS = 480.0


def test_no_check_fails_on_a_cpu(tmp_path: Path) -> None:
    outcomes = Outcomes(tmp_path / "gpu.jsonl")
    outcomes.file.write_text("{}\n")

    with memory_folder(0) as folder:
        Supervisor(Machine("cpu", folder), outcomes).run({"sglang": PARTS["sglang"]}, _SECONDS)

    ended = [outcome for outcome in outcomes.read() if outcome.status != "begun"]
    assert [outcome for outcome in ended if outcome.status != "passed"] == []
    assert {"memory of graphs", "weights from the host"} <= {outcome.check for outcome in ended}
