"""Pins of both locks fit pyproject.toml, and those for GPUs fit what SGLang asks for."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from importlib.metadata import version as installed_version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent.parent
GPU = {"platform_machine": "x86_64", "sys_platform": "linux", "extra": ""}


# the Python of each release's `python3`
PYTHON_OF_UBUNTU = {"22.04": "3.10", "24.04": "3.12"}
SUPPORTED = {"3.11", "3.12"}


def needs_of(package: str, version: str) -> list[Requirement]:
    """Return what a package asks for, if this version of it is installed."""
    try:
        if installed_version(package) != version:
            return []
    except PackageNotFoundError:
        return []
    return [Requirement(need) for need in requires(package) or []]


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


def test_image_lock_and_docs_agree_on_python_cuda_and_pytorch() -> None:
    found = pins("cuda")
    image = re.search(r"cuda:(\d+\.\d+)\.\d+-devel-ubuntu(\S+)", (ROOT / "Dockerfile").read_text())
    assert image is not None
    cuda, python = image[1], PYTHON_OF_UBUNTU[image[2]]
    head = (ROOT / "requirements" / "cuda.lock").read_text().partition("\nabsl")[0]
    resolved = re.search(r"for Python (3\.\d+) and (3\.\d+)", head)
    assert resolved is not None
    assert set(resolved.groups()) == SUPPORTED
    assert python in SUPPORTED
    assert f"Python {python}, CUDA {cuda}, PyTorch {found['torch']}" in (
        ROOT / "docs" / "gpu.md"
    ).read_text().replace("\n", " ")
    assert found["nvidia-cuda-runtime"].startswith(f"{cuda}.")


def test_cudas_compiler_is_of_its_headers_release() -> None:
    """CUDA's C++ library refuses any other one."""
    found = pins("cuda")
    parts = [found[f"nvidia-{name}"] for name in ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-runtime")]
    assert len({part.rpartition(".")[0] for part in parts}) == 1


@pytest.mark.parametrize("python", sorted(SUPPORTED))
def test_each_supported_python_finds_all_pins_that_packages_ask_for(python: str) -> None:
    """Only packages that are installed here can say what they ask for."""
    found = pins("cuda")
    release = {"python_version": python, "python_full_version": f"{python}.9"}
    lacking = {
        f"{package}: {need}"
        for package in found
        for need in needs_of(package, found[package])
        if (need.marker is None or need.marker.evaluate(GPU | release))
        and canonicalize_name(need.name) not in found
    }
    assert lacking == set()
