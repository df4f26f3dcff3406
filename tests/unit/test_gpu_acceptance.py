"""The acceptance on a GPU keeps what has ended, whatever happens to the rest."""

import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
import torch

from benchmarks.gpu import __main__ as acceptance
from benchmarks.gpu.parts import Check, Machine, Outcome, Skipped, require, run_part

MACHINE = Machine(torch.device("cpu"), Path())


def run(monkeypatch: pytest.MonkeyPatch, out: Path, checks: Mapping[str, Check]) -> list[Outcome]:
    @contextmanager
    def prepared(machine: Machine) -> Generator[Mapping[str, Check]]:
        assert machine is MACHINE
        yield checks

    module = ModuleType("benchmarks.gpu.fake")
    vars(module)["checks"] = prepared
    monkeypatch.setitem(sys.modules, "benchmarks.gpu.fake", module)
    run_part("fake", MACHINE, out)
    return written(out)


def written(out: Path) -> list[Outcome]:
    return msgspec.json.decode(out.read_bytes(), type=list[Outcome])


def test_each_check_has_an_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "outcomes"

    def skip() -> dict[str, int]:
        raise Skipped("no GPU")

    def fail() -> dict[str, int]:
        require(2 < 1, "two is more than one")
        return {}

    def last() -> dict[str, int]:
        # what a kill in this moment would leave
        assert [outcome.status for outcome in written(out)][-1] == "not run"
        return {"figure": 7}

    found = run(monkeypatch, out, {"skip": skip, "fail": fail, "last": last})
    assert [(o.check, o.status) for o in found] == [
        ("preparation", "passed"),
        ("skip", "skipped"),
        ("fail", "failed"),
        ("last", "passed"),
    ]
    assert found[1].why == "no GPU"
    assert found[2].why.endswith("Failed: two is more than one")
    assert found[3].figures == {"figure": 7}


def test_a_part_that_cannot_be_prepared_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("benchmarks.gpu.fake")
    vars(module)["checks"] = lambda machine: 1 / 0
    monkeypatch.setitem(sys.modules, "benchmarks.gpu.fake", module)
    run_part("fake", MACHINE, tmp_path / "outcomes")
    (found,) = written(tmp_path / "outcomes")
    assert (found.check, found.status) == ("preparation", "failed")
    assert "division by zero" in found.why


def test_a_part_is_ended_at_its_limit() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    assert acceptance._wait(process, 0.2) == "not done after 0 s"
    assert process.returncode is not None


def test_a_part_is_not_begun_without_time(tmp_path: Path) -> None:
    (found,) = acceptance._run_apart("native_engine", "cpu", 1.0, tmp_path)
    assert (found.status, found.why) == ("not run", "the budget is spent")


def test_runs_a_part_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--parts", "native_engine"]
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", *arguments])
    # threads that share cores with other programs wait for each other
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(SystemExit, match=r"^0$"):
        acceptance.main()
    result = msgspec.json.decode((tmp_path / "gpu.json").read_bytes())
    statuses = {outcome["status"] for outcome in result["parts"]["native_engine"]}
    assert statuses == {"passed"}
    assert "===== native_engine" in (tmp_path / "gpu.log").read_text()
