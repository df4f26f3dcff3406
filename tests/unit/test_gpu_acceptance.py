"""The acceptance on a GPU keeps what has ended, whatever happens to the rest."""

import contextlib
import importlib
import os
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import msgspec
import pytest

from benchmarks.gpu.pack import SMALL
from benchmarks.gpu.parts import PARTS, Outcome, Part
from benchmarks.gpu.supervisor import Results, Supervisor
from benchmarks.gpu.tiers import Box, complaint, look, parts_of
from benchmarks.result import describe_commit
from tests.call_paths import ROOT
from tlt.engine.sglang.client.sglang_launcher import kernel_arguments

_TINY = "tests.unit.tiny_gpu_parts"
# a supervisor as in the program, with the parts of the tests
_KILLED = f"""
import sys
from pathlib import Path
from benchmarks.gpu.parts import Part
from benchmarks.gpu.supervisor import Results, Supervisor
out = Path(sys.argv[1])
results = Results(out / "gpu.json", {{"host": {{"gpu": "a card"}}}})
parts = {{name: Part(f"{_TINY}:{{name}}", 60) for name in ("quick", "slow")}}
Supervisor("cpu", out, out / "gpu.log", results).run(parts, 120)
"""


def outcomes_in(file: Path) -> dict[str, list[Outcome]]:
    return msgspec.convert(
        msgspec.json.decode(file.read_bytes())["parts"], dict[str, list[Outcome]]
    )


def statuses(outcomes: list[Outcome]) -> list[tuple[str, str]]:
    return [(outcome.check, outcome.status) for outcome in outcomes]


def run_tiny(out: Path, seconds: float = 60.0, **budgets: float) -> dict[str, list[Outcome]]:
    results = Results(out / "gpu.json", {})
    parts = {name: Part(f"{_TINY}:{name}", budget) for name, budget in budgets.items()}
    Supervisor("cpu", out, out / "gpu.log", results).run(parts, seconds)
    return outcomes_in(out / "gpu.json")


def test_detects_the_highest_tier_and_what_is_missing() -> None:
    bare = {"torch", "transformers", "safetensors", "tokenizers", "yaml", "msgspec", "structlog"}
    ray = bare | {"ray", "redis", "redis-server"}

    def box_with(modules: set[str], device: str = "cpu") -> Box:
        return look(device, lambda module: module in modules)

    assert box_with(bare).tier == "A"
    assert box_with(bare).missing["B"] == ("ray", "redis", "redis-server")
    assert box_with(ray).tier == "B"
    assert box_with(bare | {"sglang"}).tier == "C"  # engine and rank need no Ray
    on_gpu = box_with(ray | {"sglang"}, "cuda")
    assert on_gpu.tier == "B"
    assert on_gpu.missing["C"] == ("sgl_kernel", "triton", "torch_memory_saver")
    assert complaint(box_with(bare - {"msgspec"})) is not None


def test_refuses_an_older_python_and_an_older_torch() -> None:
    box = Box("A", {"A": (), "B": (), "C": ()}, {"torch": "2.11.0+cu130"})
    assert complaint(box, (3, 12)) is None
    assert complaint(box, (3, 13)) is not None
    assert "2.11" in str(complaint(box._replace(versions={"torch": "2.9.1"}), (3, 12)))


def test_a_tier_without_ray_runs_sglang_alone() -> None:
    box = Box("C", {"A": (), "B": ("ray",), "C": ()}, {})
    runs, lacks = parts_of("C", box)
    assert {"tokens", "sglang", "sglang-duties"} <= runs.keys()
    assert lacks == {"jobs": "ray missing", "sglang-jobs": "ray missing"}
    runs, lacks = parts_of("A", box)
    assert not lacks
    assert not any(part.needs for part in runs.values())


def test_every_part_can_be_called() -> None:
    for part in PARTS.values():
        module, _, function = part.entry.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_names_no_commit_where_git_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert describe_commit() == "unknown"


def test_the_budgets_of_tier_a_fit_into_nine_minutes() -> None:
    assert sum(part.budget for part in PARTS.values() if not part.needs) <= 540


def test_each_check_has_an_outcome(tmp_path: Path) -> None:
    found = run_tiny(tmp_path, quick=60, unprepared=60)
    assert statuses(found["quick"]) == [
        ("preparation", "passed"),
        ("fail", "failed"),
        ("find", "passed"),
    ]
    assert found["quick"][1].why.endswith("Failed: two is more than one")
    assert found["quick"][2].figures == {"figure": 7, "version": "2.11"}
    assert statuses(found["unprepared"]) == [("preparation", "failed")]


def test_a_part_that_overruns_or_dies_ends_alone(tmp_path: Path) -> None:
    found = run_tiny(tmp_path, slow=2, deadly=60, quick=60)
    assert statuses(found["slow"])[1:] == [("find", "passed"), ("wait", "failed")]
    assert found["slow"][2].why.startswith("not done in 2 s")
    assert statuses(found["deadly"])[1:] == [("die", "failed")]
    assert found["deadly"][1].why.startswith("the process ended with 3")
    assert statuses(found["quick"])[-1] == ("find", "passed")


def test_packed_kernels_decode_without_flash_attention() -> None:
    assert kernel_arguments("0.4.5")["attention_backend"] == "triton"
    assert kernel_arguments("0.4.10") == kernel_arguments(None) == {}
    lock = (ROOT / "requirements" / "offline-sglang.lock").read_text()
    assert "sglang-kernel==0.4.5\n" in lock


def test_a_part_is_not_begun_without_time(tmp_path: Path) -> None:
    assert statuses(run_tiny(tmp_path, seconds=1.0, quick=60)["quick"]) == [("all", "not begun")]


def test_keeps_what_it_had_when_it_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _KILLED, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("slow find passed"):
                break
        log = (tmp_path / "gpu.log").read_text()
        deadline = time.monotonic() + 20
        while "slow wait" not in log and time.monotonic() < deadline:
            time.sleep(0.05)
            log = (tmp_path / "gpu.log").read_text()
        process.kill()
    result = msgspec.json.decode((tmp_path / "gpu.json").read_bytes())
    assert result["host"]["gpu"] == "a card"
    found = outcomes_in(tmp_path / "gpu.json")
    assert statuses(found["quick"])[-1] == ("find", "passed")
    assert statuses(found["slow"])[:2] == [("preparation", "passed"), ("find", "passed")]
    assert not [pid for pid in children_of(tmp_path) if pid != os.getpid()]


def children_of(folder: Path) -> list[int]:
    """Return the processes whose command names the folder, once those killed have had time."""
    time.sleep(0.3)
    named = list[int]()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (entry / "cmdline").read_bytes():
                named.append(int(entry.name))
        except OSError:
            continue
    return named


def link_packages(site: Path, *names: str) -> None:
    """Link distributions and all that they require into a folder."""
    todo, seen = list(names), set[str]()
    while todo:
        name = todo.pop().lower().replace("_", "-")
        if name in seen:
            continue
        seen.add(name)
        with contextlib.suppress(metadata.PackageNotFoundError):
            found = metadata.distribution(name)
            needs = [need for need in found.requires or () if "extra ==" not in need]
            todo += [match[0] for need in needs if (match := re.match(r"[\w.-]+", need))]
            for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
                (site / top).symlink_to(Path(str(found.locate_file(top))))


def test_tier_a_imports_nothing_but_its_pack_and_what_transformers_brings(tmp_path: Path) -> None:
    link_packages(tmp_path, *SMALL, "torch", "transformers")
    modules = {part.entry.partition(":")[0] for part in PARTS.values() if not part.needs}
    program = f"import benchmarks.gpu.__main__, tlt.ranks.main, {', '.join(sorted(modules))}"
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
