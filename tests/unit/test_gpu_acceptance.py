"""The acceptance on a GPU keeps what has ended, whatever happens to the rest."""

import asyncio
import contextlib
import importlib
import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

import msgspec
import pytest

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.outcomes import Outcome, Outcomes, keep_earlier
from benchmarks.gpu.pack import SMALL, add_wheel, pack
from benchmarks.gpu.parts import PARTS, Box, Part, complaint, look, parts_of
from benchmarks.gpu.supervisor import Supervisor, memory_folder
from benchmarks.result import describe_commit
from tests.call_paths import ROOT
from tests.waiting import wait_until
from tlt.engine.sglang.client.sglang_launcher import kernel_arguments
from tlt.session.session_files import shared_memory

_TINY = "tests.unit.tiny_gpu_parts"
# the program, with the parts of the tests
_KILLED = f"""
import sys
from benchmarks.gpu import __main__, parts
tiny = {{name: parts.Part(f"{_TINY}:{{name}}", 60) for name in ("quick", "slow")}}
__main__.PARTS = parts.PARTS = tiny
sys.argv[1:] = ["--device", "cpu", "--tier", "A", "--out", sys.argv[1], "--parts", *tiny]
__main__.main()
"""


def outcomes_in(file: Path) -> dict[str, list[Outcome]]:
    """Return the outcomes of each part, without what says that checks had begun."""
    found: dict[str, list[Outcome]] = {}
    for outcome in Outcomes(file).read():
        if outcome.status != "begun":
            found.setdefault(outcome.part, []).append(outcome)
    return found


def statuses(outcomes: list[Outcome]) -> list[tuple[str, str]]:
    return [(outcome.check, outcome.status) for outcome in outcomes]


def run_tiny(out: Path, seconds: float = 60.0, **budgets: float) -> dict[str, list[Outcome]]:
    file = out / "gpu.jsonl"
    file.write_text("{}\n")
    parts = {name: Part(f"{_TINY}:{name}", budget) for name, budget in budgets.items()}
    Supervisor(Machine("cpu", out), Outcomes(file)).run(parts, seconds)
    return outcomes_in(file)


def test_keeps_the_outcomes_of_an_earlier_run(tmp_path: Path) -> None:
    file = tmp_path / "gpu.jsonl"
    keep_earlier(file)
    file.write_text("earlier")
    os.utime(file, (0, 0))
    keep_earlier(file)
    assert [each.name for each in tmp_path.iterdir()] == ["gpu-19700101-000000.jsonl"]


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
    box = Box({"A": (), "B": (), "C": ()}, {"torch": "2.11.0+cu130"})
    assert complaint(box, python=(3, 12)) is None
    assert complaint(box, python=(3, 13)) is not None
    assert "2.11" in str(complaint(box._replace(versions={"torch": "2.9.1"}), python=(3, 12)))


def test_names_what_is_missing_before_anything_is_imported() -> None:
    """A machine that has nothing is told so in a line."""
    command = [sys.executable, "-S", "-m", "benchmarks.gpu", "--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("tier A doesn't run here: torch, transformers, safetensors,")
    assert len(done.stderr.splitlines()) == 1


def test_a_tier_that_is_asked_for_needs_its_packages() -> None:
    box = Box({"A": (), "B": ("ray",), "C": ("sglang",)}, {"torch": "2.14.1"})
    assert complaint(box) is None
    assert "ray missing" in str(complaint(box, "B"))
    assert "sglang missing" in str(complaint(box, "C"))


def test_a_tier_without_ray_runs_sglang_alone() -> None:
    box = Box({"A": (), "B": ("ray",), "C": ()}, {})
    assert box.tier == "C"
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
        ("end", "passed"),
    ]
    assert found["quick"][1].why.endswith("AssertionError: two is more than one")
    assert found["quick"][2].figures == {"figure": 7, "version": "2.11"}
    assert statuses(found["unprepared"])[0] == ("preparation", "failed")


def test_a_part_that_overruns_or_dies_ends_alone(tmp_path: Path) -> None:
    found = run_tiny(tmp_path, slow=2, deadly=60, quick=60)
    assert statuses(found["slow"])[1:] == [("find", "passed"), ("wait", "failed")]
    assert found["slow"][2].why.startswith("not done in 2 s")
    assert statuses(found["deadly"])[1:] == [("die", "failed")]
    assert found["deadly"][1].why == "the process ended with 3: deadly die"
    assert statuses(found["quick"])[-1] == ("end", "passed")


def test_packed_kernels_decode_without_flash_attention() -> None:
    assert kernel_arguments("0.4.5")["attention_backend"] == "triton"
    assert kernel_arguments("0.4.10") == kernel_arguments(None) == {}
    lock = (ROOT / "requirements" / "offline-sglang.lock").read_text()
    assert "sglang-kernel==0.4.5\n" in lock


def test_a_packed_site_lacks_what_is_cut_and_keeps_what_may_run(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "one.whl", "w") as wheel:
        program = zipfile.ZipInfo("bin/nvcc")
        program.external_attr = 0o755 << 16
        wheel.writestr(program, "compile")
        wheel.writestr("sgl_kernel/flash_ops.so", "large")
        wheel.mkdir("sgl_kernel")
    with tarfile.open(tmp_path / "site.tar", "w") as site:
        add_wheel(tmp_path / "one.whl", site)
    with tarfile.open(tmp_path / "site.tar") as site:
        site.extractall(tmp_path, filter="tar")
    assert (tmp_path / "bin" / "nvcc").read_text() == "compile"
    assert os.access(tmp_path / "bin" / "nvcc", os.X_OK)
    assert not (tmp_path / "sgl_kernel").exists()


def test_a_pack_installs_into_another_python_without_a_network(tmp_path: Path) -> None:
    pack(tmp_path / "wheels", "A", "3.12")
    assert sum(file.stat().st_size for file in (tmp_path / "wheels").iterdir()) < 16e6
    install = ["install", "--quiet", "--no-index", "--find-links", str(tmp_path / "wheels")]
    install += ["--only-binary=:all:", "--python-version", "3.12", "--no-deps", *SMALL]
    subprocess.run(
        [sys.executable, "-m", "pip", *install, "--target", str(tmp_path / "site")], check=True
    )
    assert list((tmp_path / "site" / "msgspec").glob("*.cpython-312-*.so"))


def test_a_part_is_not_begun_without_time(tmp_path: Path) -> None:
    assert statuses(run_tiny(tmp_path, seconds=1.0, quick=60)["quick"]) == [("all", "not begun")]


def test_keeps_what_it_had_when_it_is_killed(tmp_path: Path) -> None:
    outcomes = Outcomes(tmp_path / "gpu.jsonl")
    command = [sys.executable, "-c", _KILLED, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("slow find passed"):
            assert process.poll() is None
        asyncio.run(wait_until(lambda: outcomes.read()[-1].check == "wait"))
        process.kill()
        # it ends when the last process has ended that could write
        assert process.stdout.read() == ""
    facts = msgspec.json.decode(outcomes.file.read_bytes().splitlines()[0])
    assert facts["host"]["python"] == platform.python_version()
    found = outcomes_in(outcomes.file)
    assert statuses(found["quick"])[-1] == ("end", "passed")
    assert statuses(found["slow"]) == [("preparation", "passed"), ("find", "passed")]
    [left] = shared_memory().glob(f"tlt-*-gpu-{process.pid}")
    with memory_folder() as folder:
        assert folder.is_dir()
        assert not left.exists()
    assert not folder.exists()


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
    modules = {"benchmarks.gpu.acceptance"} | {
        part.entry.partition(":")[0] for part in PARTS.values() if not part.needs
    }
    program = f"import tlt.ranks.main, {', '.join(sorted(modules))}"
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_uses_a_disk_where_shared_memory_is_small(tmp_path: Path) -> None:
    with memory_folder() as folder:
        assert folder.parent == shared_memory()
    with memory_folder(least_bytes=1 << 60) as folder:
        assert folder.is_dir()
        assert folder.parent == Path(tempfile.gettempdir())
    assert not folder.exists()
