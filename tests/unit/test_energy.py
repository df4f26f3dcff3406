"""Joules: counters that wrap or may not be read, and one of a host that all its workers read."""

from pathlib import Path

import pytest

from tests.samples import JOB
from tlt.actors.energy_meter import EnergyMeter, processor_counters
from tlt.ids import Attempt, Epoch, Incarnation, PolicyVersion, Step, WorkerId
from tlt.protocol.events import PolicyUpdateFinished
from tlt.protocol.records import Joules
from tlt.report.energy import Energy


def package(folder: Path, name: str, microjoules: int) -> Path:
    found = folder / name
    found.mkdir()
    (found / "max_energy_range_uj").write_text("10000000\n")
    (found / "energy_uj").write_text(f"{microjoules}\n")
    return found / "energy_uj"


def test_sockets_are_counted_and_their_parts_are_not(tmp_path: Path) -> None:
    first = package(tmp_path, "intel-rapl:0", 9_000_000)
    second = package(tmp_path, "intel-rapl:1", 0)
    part = package(tmp_path, "intel-rapl:0:0", 0)
    meter = EnergyMeter(processor_counters(tmp_path), [])
    assert meter.read() == Joules(host=0.0, devices=None)
    first.write_text("2000000")  # it was full on the way
    second.write_text("500000")
    part.write_text("7000000")
    assert meter.read() == Joules(host=pytest.approx(3.5), devices=None)
    first.unlink()
    assert meter.read() == Joules(host=pytest.approx(3.5), devices=None)


def test_a_machine_that_does_not_count(tmp_path: Path) -> None:
    package(tmp_path, "intel-rapl:0", 0).unlink()
    assert processor_counters(tmp_path) == processor_counters(tmp_path / "nowhere") == []
    assert EnergyMeter([], []).read() is None


def learned(
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


def test_a_hosts_joules_are_counted_once_and_a_workers_own_each() -> None:
    energy = Energy()
    assert energy.of(Step(0)) is energy.total() is None
    energy.add(learned(0, 1, 100.0, 10.0), "a")
    energy.add(learned(0, 2, 101.0, 20.0), "a")
    energy.add(learned(0, 3, 50.0, None), "b")
    energy.add(learned(1, 1, 140.0, 15.0), "a")
    # this one came anew in the middle of the step
    energy.add(learned(1, 4, 5.0, 2.0), "a")
    assert energy.of(Step(0)) == Joules(host=151.0, devices=30.0)
    assert energy.of(Step(1)) == Joules(host=40.0, devices=7.0)
    assert energy.total() == Joules(host=191.0, devices=37.0)
