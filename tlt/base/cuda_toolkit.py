"""Find what SGLang compiles kernels with, packages of Python included.

SGLang looks for nvcc in CUDA_HOME, CUDA_PATH, PATH and /usr/local/cuda. A package puts it
elsewhere, and libraries under names that a linker doesn't look for.
"""

import os
import shutil
import sys
import sysconfig
from pathlib import Path

_SYSTEM = Path("/usr/local/cuda")
_PARTS = ("bin/nvcc", "include/cuda_runtime.h", "lib64/libcudart.so")


def build_environment(folder: Path) -> dict[str, str]:
    """Return variables with which SGLang finds its tools; `folder` is made if it has to be."""
    found = {"PATH": _path()}
    if (package := packaged_toolkit()) is not None:
        _lay_out(package, folder)
        found["CUDA_HOME"] = str(folder)
    return found


def lacking_build_tools() -> list[str]:
    """Name the tools that SGLang lacks to compile kernels, with what packages bring."""
    tools = (os.environ.get("CXX", "c++"), "ninja")
    lacking = [tool for tool in tools if shutil.which(tool, path=_path()) is None]
    part = None if packaged_toolkit() else _lacking_part(_toolkit())
    return lacking if part is None else [part, *lacking]


def packaged_toolkit() -> Path | None:
    """Return the folder of a package's toolkit, if SGLang finds no other one."""
    if _lacking_part(_toolkit()) is None:
        return None
    found = (nvcc for path in sys.path for nvcc in Path(path).glob("nvidia/cu*/bin/nvcc"))
    return next((nvcc.resolve().parent.parent for nvcc in found), None)


def _toolkit() -> Path:
    """Return the folder that SGLang takes for CUDA's toolkit."""
    if named := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return Path(named)
    nvcc = shutil.which("nvcc")
    return _SYSTEM if nvcc is None else Path(nvcc).parent.parent


def _lacking_part(toolkit: Path) -> str | None:
    lacking = (toolkit / part for part in _PARTS if not (toolkit / part).exists())
    return next(map(str, lacking), None)


def _lay_out(package: Path, folder: Path) -> None:
    """Link to a package's files from where a toolkit has them."""
    libraries = folder / "lib64"
    libraries.mkdir(parents=True)
    for part in package.iterdir():
        if part.name != libraries.name:
            (folder / part.name).symlink_to(part)
    for library in (package / "lib").iterdir():
        (libraries / library.name).symlink_to(library)
        name, numbered, _ = library.name.partition(".so.")
        if numbered and not (package / "lib" / f"{name}.so").exists():
            (libraries / f"{name}.so").symlink_to(library)


def _path() -> str:
    """Return PATH with the folder of the environment's programs, such as ninja."""
    return os.pathsep.join((os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")))
