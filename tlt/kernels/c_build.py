"""C is built where there is a compiler, and the result kept for the life of the process.

That takes a second or so, and nothing is cached: a cache would have to know the machine. What was
built is used only after it agreed with torch.
"""

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import structlog

_log = structlog.get_logger("kernels")
_FLAGS = ("-O3", "-march=native", "-shared", "-fPIC", f"-I{Path(__file__).parent}")
# A compiler that takes longer hangs.
_PATIENCE = 60.0

_Built = TypeVar("_Built")


def build_kernels(
    sources: Sequence[Path],
    wrapped: Callable[[ctypes.CDLL], _Built],
    agrees: Callable[[_Built], bool],
) -> _Built | None:
    """None, and one line in the log, where it cannot be had."""
    try:
        found = wrapped(_build(sources))
    except subprocess.CalledProcessError as error:
        return _without(sources, str(error.stderr))
    except (OSError, ValueError, AttributeError, subprocess.TimeoutExpired) as error:
        return _without(sources, str(error))
    # A thread of its own, because the caller may be inside an operator or without gradients.
    with ThreadPoolExecutor(1) as thread:
        right = thread.submit(agrees, found).result()
    return found if right else _without(sources, "what they compute is wrong")


def _build(sources: Sequence[Path]) -> ctypes.CDLL:
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or "gcc"]
    # Some file systems keep a library's file as long as it is mapped.
    with tempfile.TemporaryDirectory(prefix="tlt-", ignore_cleanup_errors=True) as folder:
        library = f"{folder}/kernels.so"
        subprocess.run(
            [*compiler, *_FLAGS, "-o", library, *map(str, sources), "-lm"],
            check=True,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=_PATIENCE,
        )
        return ctypes.CDLL(library)


def _without(sources: Sequence[Path], error: str) -> None:
    first, *_ = error.splitlines() or [""]
    names, compiler = [source.name for source in sources], os.environ.get("CC", "cc")
    _log.warning("kernels are not built", sources=names, compiler=compiler, error=first)
