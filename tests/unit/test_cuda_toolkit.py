"""SGLang finds the compiler of CUDA in a package, laid out as its builds expect a toolkit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_machine_check import by_name, gpus
from tlt.base import cuda_toolkit
from tlt.base.cuda_toolkit import build_environment, lacking_build_tools
from tlt.doctor import cuda_findings
from tlt.doctor.cuda_findings import check_cuda, check_kernel_builds

NVCC = "#!/bin/sh\necho release 13.0\n"


def write(file: Path, text: str = "") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a machine's folder of programs: a C++ compiler and ninja, and no toolkit of CUDA."""
    programs = tmp_path / "bin"
    for name in ("c++", "ninja"):
        write(programs / name, "#!/bin/sh\n")
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(cuda_toolkit, "_SYSTEM", tmp_path / "none")
    monkeypatch.setattr(sys, "path", [])
    return programs


@pytest.fixture
def package(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install files as the packages nvidia-cuda-nvcc and nvidia-cuda-runtime have them."""
    site = tmp_path / "site-packages"
    write(site / "nvidia/cu13/bin/nvcc", NVCC)
    for name in ("include/cuda_runtime.h", "nvvm/bin/cicc", "lib/libcudart.so.13", "lib/libx.a"):
        write(site / "nvidia/cu13" / name)
    monkeypatch.setattr(sys, "path", ["", str(site)])
    return site / "nvidia/cu13"


def test_a_packages_toolkit_is_laid_out_for_compiler_and_linker(
    package: Path, tmp_path: Path
) -> None:
    home = Path(build_environment(tmp_path / "cuda")["CUDA_HOME"])
    told = subprocess.run([home / "bin/nvcc"], capture_output=True, text=True, check=True)
    assert told.stdout == "release 13.0\n"
    for name in ("include/cuda_runtime.h", "nvvm/bin/cicc", "lib64/libx.a"):
        assert (home / name).is_file()
    # the name that `-lcudart` looks for
    assert (home / "lib64/libcudart.so").resolve() == package / "lib/libcudart.so.13"


def test_a_whole_toolkit_of_the_machine_is_left_alone(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bin/nvcc", "include/cuda_runtime.h", "lib64/libcudart.so"):
        write(tmp_path / "own" / name)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "own"))
    assert "CUDA_HOME" not in build_environment(tmp_path / "cuda")
    assert not (tmp_path / "cuda").exists()


def test_programs_of_the_environment_are_found(bare: Path, tmp_path: Path) -> None:
    """A venv that isn't activated has its ninja beside its Python."""
    path = build_environment(tmp_path / "cuda")["PATH"].split(os.pathsep)
    assert path == [str(bare), str(Path(sys.executable).parent)]


def test_names_what_a_machine_lacks(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    (bare / "ninja").unlink()
    monkeypatch.setattr(cuda_toolkit, "_path", lambda: str(bare))
    nvcc, *others = lacking_build_tools()
    assert nvcc.endswith("/none/bin/nvcc")
    assert others == ["no-such-compiler", "ninja"]
    found = by_name(list(check_cuda(gpus(), wanted=True)))["kernel builds"]
    assert found.status == "warning"
    assert "no no-such-compiler, no ninja" in found.found
    assert "nvidia-cuda-nvcc==13.0.*" in found.advice


def test_a_wrapper_of_nvcc_without_libraries_is_no_toolkit(bare: Path) -> None:
    write(bare / "nvcc", NVCC)
    (lacking,) = lacking_build_tools()
    assert lacking.endswith("/include/cuda_runtime.h")


@pytest.mark.parametrize(
    ("nvcc", "status"), [("13.0.88", "ok"), ("13.5.37", "warning"), (None, "warning")]
)
def test_a_compiler_that_the_headers_refuse_is_named(
    package: Path, monkeypatch: pytest.MonkeyPatch, nvcc: str | None, status: str
) -> None:
    versions = {"nvidia-cuda-nvcc": nvcc, "nvidia-cuda-runtime": "13.0.96"}
    monkeypatch.setattr(cuda_findings, "installed_version", versions.get)
    found = check_kernel_builds("13.0")
    assert found.status == status
    assert ("nvidia-nvvm==13.0.*" in found.advice) == (status != "ok")


def test_a_machine_without_a_gpu_needs_no_toolkit(bare: Path) -> None:
    assert "kernel builds" not in by_name(list(check_cuda(gpus(devices=()), wanted=False)))
