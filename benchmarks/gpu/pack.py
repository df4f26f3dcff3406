"""Gather wheels on a machine with a network for one that has PyTorch and Transformers only.

Tier A: the wheels that `pip install --no-index --find-links DIR` takes. Tier C: SGLang and all that
it needs beside those, unzipped into one archive, because its kernels are cut: `tar -xf
DIR/site.tar.xz -C FOLDER`, then PYTHONPATH=FOLDER. The kernels' version is the one made for PyTorch
2.11, without the parts for other chips and without FlashAttention 3, which is most of its size.
Ray isn't packed: engine and rank run without it. Nothing is run of what is packed.
"""

import fnmatch
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.parts import Tier

# what tier A imports beside Transformers' own needs
SMALL = ("msgspec", "structlog")
_SITE = "site.tar.xz"
_LOCKS = Path(__file__).resolve().parents[2] / "requirements"
_CUT = (
    *("sgl_kernel/flash_ops*", "sgl_kernel/sm100/*", "sgl_kernel/infllm_ops*"),
    *("sgl_kernel/flashmla_ops*", "sglang/multimodal_gen/*", "sglang/test/*", "jedi/third_party/*"),
)
# manylinux by glibc; pip matches each name alone
_PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 26, 24, 17)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"),
)


def pack(folder: Path, tier: Tier, python: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    small = ["--constraint", str(_LOCKS / "cuda.lock"), *SMALL]
    if tier != "C":
        _download(small, folder, python)
    else:
        with tempfile.TemporaryDirectory() as name, tarfile.open(folder / _SITE, "w:xz") as site:
            wheels = Path(name)
            _download(small, wheels, python)
            _download(["--requirement", str(_LOCKS / "offline-sglang.lock")], wheels, python)
            for wheel in sorted(wheels.glob("*.whl")):
                add_wheel(wheel, site)
    for file in sorted(folder.iterdir()):
        print(f"{file.stat().st_size / 1e6:8.2f} MB  {file}")


def _download(wanted: Sequence[str], folder: Path, python: str) -> None:
    """Download wheels for another machine."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    command += [word for platform in _PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*command, "--dest", str(folder), *wanted], check=True)


def add_wheel(wheel: Path, site: tarfile.TarFile) -> None:
    """Add what a wheel holds, but for what is cut."""
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            cut = any(fnmatch.fnmatch(info.filename, pattern) for pattern in _CUT)
            if not cut and not info.is_dir():
                entry = tarfile.TarInfo(info.filename)
                entry.size, entry.mode = info.file_size, 0o644 | info.external_attr >> 16 & 0o111
                site.addfile(entry, archive.open(info))
