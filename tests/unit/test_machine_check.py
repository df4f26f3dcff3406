"""Findings stop TLT where something is missing, and warn where it is only unusual."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from tlt.doctor import all_checks, cuda_findings
from tlt.doctor.all_checks import check_machine
from tlt.doctor.cuda_devices import CudaDevice, CudaState
from tlt.doctor.cuda_findings import check_cuda
from tlt.doctor.findings import Finding
from tlt.doctor.local_devices import local_devices
from tlt.doctor.tested_versions import (
    RANGES,
    SupportedRange,
    check_package,
    parse_version,
)
from tlt.engine.sglang.client import sglang_launcher

ROOT = Path(__file__).resolve().parents[2]
H100 = CudaDevice(name="NVIDIA H100", free=84 * 10**9, total=85 * 10**9, capability="9.0")
NO_GPU = CudaState()


def gpus(count: int = 1, **changes: Any) -> CudaState:
    settings: dict[str, Any] = {
        "torch_cuda": "13.0",
        "driver": "580.95.05",
        "devices": (H100,) * count,
    }
    return CudaState(**(settings | changes))


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in findings}


def test_ranges_are_those_of_the_package_and_its_lock() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for each in project["optional-dependencies"].values() for line in each]
    declared = {line.replace("[hiredis]", "") for line in (*project["dependencies"], *extras)}
    lock = (ROOT / "requirements" / "cpu.lock").read_text().splitlines()
    for each in RANGES:
        least = ".".join(map(str, each.least))
        if each.package == "sglang":
            assert f"sglang=={least}" in declared
            assert least == sglang_launcher.VERSION
        else:
            below = "" if each.below is None else f",<{'.'.join(map(str, each.below))}"
            assert f"{each.package}>={least}{below}" in declared
        if each.tested != "none yet":
            assert f"{each.package}=={each.tested}" in lock


@pytest.mark.parametrize(
    ("version", "needed", "status"),
    [
        ("2.13.0+cpu", True, "ok"),
        ("2.10.1", True, "missing"),
        ("3.0", True, "missing"),
        ("2.10.1", False, "warning"),
        (None, True, "missing"),
        (None, False, "warning"),
    ],
)
def test_a_package_out_of_its_range_is_named(
    version: str | None, needed: bool, status: str
) -> None:
    tested = SupportedRange("thing", (2, 11), (3,), "2.13.0", needed, "slower")
    finding = check_package(tested, version)
    assert finding.status == status
    assert ("pip install 'thing>=2.11,<3'" in finding.advice) == (status != "ok")


def test_release_numbers_are_compared_as_numbers() -> None:
    assert parse_version("2.9.1") < parse_version("2.13.0+cpu") < parse_version("2.13.0.1")


def test_this_machine_can_run_tlt(tmp_path: Path) -> None:
    findings = check_machine(tmp_path / "runs", NO_GPU)
    assert [f for f in findings if f.status == "missing"] == []
    names = by_name(findings)
    assert {"Python", "torch", "sglang", "redis-server", "import ray", "ports"} <= set(names)
    assert names["devices"].status == "ok"


@pytest.mark.parametrize(("version", "status"), [("0.0.10", "ok"), (None, "warning")])
def test_a_gpu_without_torch_memory_saver_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, version: str | None, status: str
) -> None:
    monkeypatch.setattr(cuda_findings, "installed_version", lambda _: version)
    assert by_name(list(check_cuda(gpus(), wanted=True)))["torch-memory-saver"].status == status
    assert "torch-memory-saver" not in by_name(list(check_cuda(NO_GPU, wanted=False)))


def test_a_session_on_gpus_needs_one() -> None:
    found = by_name(list(check_cuda(NO_GPU, wanted=True)))
    assert found["devices"].status == "missing"
    assert found["CUDA of torch"].status == "missing"
    assert "built for CUDA" in found["CUDA of torch"].advice


def test_an_old_driver_is_named_with_the_one_that_is_needed() -> None:
    found = by_name(list(check_cuda(gpus(driver="570.86"), wanted=True)))
    assert found["driver"].status == "missing"
    assert found["driver"].advice == "CUDA 13.0 needs 580 or newer"
    assert by_name(list(check_cuda(gpus(driver="580.1"), wanted=True)))["driver"].status == "ok"


def test_a_torch_for_cpus_beside_a_driver_warns() -> None:
    state = CudaState(driver="580.95")
    assert by_name(list(check_cuda(state, wanted=False)))["CUDA of torch"].status == "warning"


@pytest.mark.parametrize(
    ("device", "status"),
    [
        (H100, "ok"),
        (CudaDevice(name="taken", free=10**9, total=85 * 10**9, capability="9.0"), "warning"),
        (CudaDevice(name="old", free=16 * 10**9, total=16 * 10**9, capability="7.5"), "warning"),
    ],
)
def test_each_device_is_listed_with_its_free_memory(device: CudaDevice, status: str) -> None:
    found = by_name(list(check_cuda(gpus(devices=(device,)), wanted=True)))
    assert found["device 0"].status == status
    assert f"{device.free / 1e9:.1f} of" in found["device 0"].found


def test_devices_that_cannot_be_used_say_why() -> None:
    state = gpus(devices=(), error="CUDA driver initialization failed")
    found = by_name(list(check_cuda(state, wanted=True)))
    assert found["devices"].status == "missing"
    assert "initialization failed" in found["devices"].found


def test_a_taken_port_of_the_dashboard_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_checks, "_can_listen", lambda port: port == 0)
    assert by_name(check_machine(tmp_path, NO_GPU))["ports"].status == "ok"
    monkeypatch.setattr(all_checks, "_can_listen", lambda port: False)
    assert by_name(check_machine(tmp_path, NO_GPU))["ports"].status == "missing"


def test_without_a_compiler_tlt_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    assert by_name(check_machine(tmp_path, NO_GPU))["C compiler"].status == "warning"


def test_names_the_limits_of_rewards_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_checks, "namespaces_work", lambda network: False)
    finding = by_name(check_machine(tmp_path, NO_GPU))["limits of rewards and environments"]
    assert (finding.found, finding.status) == ("no user namespaces", "warning")
    assert "reward.isolation" in finding.advice


def test_devices_of_this_machine_are_planned_for_by_default() -> None:
    plan = local_devices(gpus(4))
    assert (plan.devices, plan.memory, plan.type) == (4, H100.total, "cuda")
    assert local_devices(NO_GPU).type == "cpu"
