"""Build C kernels with the machine's compiler, once per process, and check them against torch.

A build takes about a second and isn't cached, because a cache would have to know the machine.
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
# seconds after which the compiler is taken to hang
TIMEOUT_SECONDS = 60.0

_Built = TypeVar("_Built")


def build_kernels(
    sources: Sequence[Path],
    wrap: Callable[[ctypes.CDLL], _Built],
    agrees: Callable[[_Built], bool],
) -> _Built | None:
    """Return the wrapped library, or log why there is none and return None."""
    try:
        kernels = wrap(_build(sources))
    except subprocess.CalledProcessError as error:
        return _without(sources, str(error.stderr))
    except (OSError, ValueError, AttributeError, subprocess.TimeoutExpired) as error:
        return _without(sources, str(error))
    # in another thread, because the caller may be inside an operator or have gradients disabled
    with ThreadPoolExecutor(1) as thread:
        correct = thread.submit(agrees, kernels).result()
    return kernels if correct else _without(sources, "what they compute is wrong")


def _build(sources: Sequence[Path]) -> ctypes.CDLL:
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or "gcc"]
    # some file systems keep a library's file as long as it is mapped
    with tempfile.TemporaryDirectory(prefix="tlt-", ignore_cleanup_errors=True) as folder:
        library = f"{folder}/kernels.so"
        subprocess.run(
            [*compiler, *_FLAGS, "-o", library, *map(str, sources), "-lm"],
            check=True,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
        return ctypes.CDLL(library)


def _without(sources: Sequence[Path], error: str) -> None:
    first, *_ = error.splitlines() or [""]
    names, compiler = [source.name for source in sources], os.environ.get("CC", "cc")
    _log.warning("kernels are not built", sources=names, compiler=compiler, error=first)
