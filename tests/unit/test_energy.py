"""Counters of joules may wrap or be unreadable; all workers of a host read the same one."""

from pathlib import Path

import pytest

from tests.samples import JOB
from tlt.actors.energy_meter import EnergyMeter, processor_counters
from tlt.id_types import Attempt, Epoch, Incarnation, PolicyVersion, Step, WorkerId
from tlt.protocol.events import PolicyUpdateFinished
from tlt.protocol.shared_values import Joules
from tlt.report.energy import EnergyByStep


def package(folder: Path, name: str, microjoules: int) -> Path:
    found = folder / name
    found.mkdir()
    (found / "max_energy_range_uj").write_text("10000000\n")
    (found / "energy_uj").write_text(f"{microjoules}\n")
    return found / "energy_uj"


def test_counts_sockets_but_not_their_parts(tmp_path: Path) -> None:
    first = package(tmp_path, "intel-rapl:0", 9_000_000)
    second = package(tmp_path, "intel-rapl:1", 0)
    part = package(tmp_path, "intel-rapl:0:0", 0)
    meter = EnergyMeter(processor_counters(tmp_path), [])
    assert meter.read() == Joules(host=0.0, devices=None)
    first.write_text("2000000")  # it wrapped
    second.write_text("500000")
    part.write_text("7000000")
    assert meter.read() == Joules(host=pytest.approx(3.5), devices=None)
    first.unlink()
    assert meter.read() == Joules(host=pytest.approx(3.5), devices=None)


def test_reads_nothing_on_a_machine_without_counters(tmp_path: Path) -> None:
    package(tmp_path, "intel-rapl:0", 0).unlink()
    assert processor_counters(tmp_path) == processor_counters(tmp_path / "nowhere") == []
    assert EnergyMeter([], []).read() is None


def update_finished(
    step: int, incarnation: int, host: float | None, devices: float | None
) -> PolicyUpdateFinished:
    return PolicyUpdateFinished(
        job=JOB,
        epoch=Epoch(1),
        step=Step(step),
        attempt=Attempt(0),
        worker=WorkerId(f"w{incarnation}"),
        incarnation=Incarnation(incarnation),
        version=PolicyVersion(step + 1),
        seconds=1.0,
        joules=Joules(host=host, devices=devices),
    )


def test_counts_a_hosts_joules_once_and_each_workers_own() -> None:
    energy = EnergyByStep()
    assert energy.of(Step(0)) is energy.total() is None
    energy.add(update_finished(0, 1, 100.0, 10.0), "a")
    energy.add(update_finished(0, 2, 101.0, 20.0), "a")
    energy.add(update_finished(0, 3, 50.0, None), "b")
    energy.add(update_finished(1, 1, 140.0, 15.0), "a")
    # this worker joined in the middle of the step
    energy.add(update_finished(1, 4, 5.0, 2.0), "a")
    assert energy.of(Step(0)) == Joules(host=151.0, devices=30.0)
    assert energy.of(Step(1)) == Joules(host=40.0, devices=7.0)
    assert energy.total() == Joules(host=191.0, devices=37.0)
