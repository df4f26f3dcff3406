"""Pins of both locks fit pyproject.toml, and those for GPUs fit what SGLang asks for."""

import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent.parent
GPU = {"platform_machine": "x86_64", "sys_platform": "linux", "extra": ""}


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / f"{name}.lock").read_text().splitlines()
    found = (line.partition("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(package): version for package, _, version in found}


def misfits(wanted: list[str], found: dict[str, str]) -> list[str]:
    requirements = map(Requirement, wanted)
    return [
        str(r)
        for r in requirements
        if (r.marker is None or r.marker.evaluate(GPU))
        and not r.specifier.contains(found.get(canonicalize_name(r.name), "0"), prereleases=True)
    ]


@pytest.mark.parametrize("lock", ["cpu", "cuda"])
def test_pins_are_in_the_ranges_of_the_project(lock: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    wanted = [*project["dependencies"], *optional["sglang"]]
    assert misfits(wanted, pins(lock)) == []


@pytest.mark.parametrize("lock", ["cpu", "cuda"])
def test_pins_of_reasoning_gym_are_those_that_it_asks_for(lock: str) -> None:
    own, found = pins("reasoning-gym"), pins(lock)
    assert {name for name in own.keys() & found.keys() if own[name] != found[name]} == set()
    wanted = [need for name in own for need in requires(name) or []]
    assert misfits(wanted, found | own) == []


def test_the_gpus_pins_are_those_that_sglang_asks_for() -> None:
    found = pins("cuda")
    assert misfits(requires("sglang") or [], found) == []
    assert misfits(["torch==2.0"], found) == ["torch==2.0"]
