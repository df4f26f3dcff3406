"""Joules, where a machine counts them: its processors by RAPL, NVIDIA's GPUs by NVML.

A processor's counter is that of its host, whoever works there; a GPU's belongs to its worker.
"""

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tlt.protocol.records import Joules

_RAPL = Path("/sys/class/powercap")
# one for each socket; what lies below them is counted in them
_PACKAGES = "intel-rapl:[0-9]*"
_MICRO, _MILLI = 1e-6, 1e-3
Counter = Callable[[], float]


class Meter:
    """What has been spent since it was made."""

    def __init__(self, processors: Iterable[Counter], gpus: Iterable[Counter]) -> None:
        self._processors = [(counter, counter()) for counter in processors]
        self._gpus = [(counter, counter()) for counter in gpus]

    def read(self) -> Joules | None:
        if not self._processors and not self._gpus:
            return None
        return Joules(host=_spent(self._processors), devices=_spent(self._gpus))


def _spent(counters: list[tuple[Counter, float]]) -> float | None:
    return sum(counter() - began for counter, began in counters) if counters else None


def packages(folder: Path = _RAPL) -> list[Counter]:
    """Those that may be read: often only root may."""
    found: list[Counter] = []
    for package in sorted(folder.glob(_PACKAGES)):
        if ":" in package.name.partition(":")[2]:
            continue  # a part of a package
        with contextlib.suppress(OSError, ValueError):
            found.append(Package(package))
    return found


class Package:
    """A socket's counter, which begins anew when it is full."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self._range = int((folder / "max_energy_range_uj").read_text())
        self._last = self._raw()
        self._full = 0

    def __call__(self) -> float:
        with contextlib.suppress(OSError, ValueError):
            now = self._raw()
            self._full += now < self._last
            self._last = now
        return _MICRO * (self._full * self._range + self._last)

    def _raw(self) -> int:
        return int(self._file.read_text())


def gpus(count: int) -> list[Counter]:
    """Of the first so many that this process may see."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports]
    except ImportError:
        return []
    return _nvml(pynvml, count)


def _nvml(nvml: Any, count: int) -> list[Counter]:
    found: list[Counter] = []
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlInit()
        for name in _visible(count):
            handle = (
                nvml.nvmlDeviceGetHandleByIndex(int(name))
                if name.isdecimal()
                else nvml.nvmlDeviceGetHandleByUUID(name)
            )
            found.append(Gpu(nvml, handle))  # older ones have no counter
    return found


class Gpu:
    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._last = self._raw()

    def __call__(self) -> float:
        with contextlib.suppress(self._nvml.NVMLError):
            self._last = self._raw()
        return _MILLI * self._last

    def _raw(self) -> int:
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)


def _visible(count: int) -> list[str]:
    """By index or UUID, as Ray names those that it has given to this process."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(index) for index in range(count)] if named is None else named.split(",")
    return [name.strip() for name in names if name.strip()][:count]
