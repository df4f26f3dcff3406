"""Energy is read from hardware counters: RAPL for processors, NVML for NVIDIA GPUs.

A processor's counter measures its whole host, whichever process works there; a GPU's counter
belongs to its worker.
"""

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tlt.protocol.shared_values import Joules

_RAPL = Path("/sys/class/powercap")
# one folder for each socket; its subfolders count parts of the socket's energy
_SOCKETS = "intel-rapl:[0-9]*"
_MICRO, _MILLI = 1e-6, 1e-3
Counter = Callable[[], float]


class EnergyMeter:
    """Measure the energy spent since the meter was made."""

    def __init__(self, processors: Iterable[Counter], gpus: Iterable[Counter]) -> None:
        self._processors = [(counter, counter()) for counter in processors]
        self._gpus = [(counter, counter()) for counter in gpus]

    def read(self) -> Joules | None:
        if not self._processors and not self._gpus:
            return None
        return Joules(host=_spent(self._processors), devices=_spent(self._gpus))


def _spent(counters: list[tuple[Counter, float]]) -> float | None:
    return sum(counter() - start for counter, start in counters) if counters else None


def processor_counters(folder: Path = _RAPL) -> list[Counter]:
    """Return the counters of the sockets that this process may read: often only root may."""
    found: list[Counter] = []
    for socket in sorted(folder.glob(_SOCKETS)):
        if ":" in socket.name.partition(":")[2]:
            continue  # a part of a socket
        with contextlib.suppress(OSError, ValueError):
            found.append(_ProcessorCounter(socket))
    return found


class _ProcessorCounter:
    """Read a socket's counter, which starts over at its range."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self._range = int((folder / "max_energy_range_uj").read_text())
        self._last = self._raw()
        self._overflows = 0

    def __call__(self) -> float:
        with contextlib.suppress(OSError, ValueError):
            now = self._raw()
            self._overflows += now < self._last
            self._last = now
        return _MICRO * (self._overflows * self._range + self._last)

    def _raw(self) -> int:
        return int(self._file.read_text())


def gpu_counters(count: int) -> list[Counter]:
    """Return the counters of the first `count` GPUs that this process may use."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports]
    except ImportError:
        return []
    return _nvml_counters(pynvml, count)


def _nvml_counters(nvml: Any, count: int) -> list[Counter]:
    found: list[Counter] = []
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlInit()
        for name in _visible_gpus(count):
            handle = (
                nvml.nvmlDeviceGetHandleByIndex(int(name))
                if name.isdecimal()
                else nvml.nvmlDeviceGetHandleByUUID(name)
            )
            found.append(_GpuCounter(nvml, handle))  # an old GPU has no counter and raises
    return found


class _GpuCounter:
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


def _visible_gpus(count: int) -> list[str]:
    """Return the indices or UUIDs of the GPUs that Ray has given to this process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(index) for index in range(count)] if visible is None else visible.split(",")
    return [name.strip() for name in names if name.strip()][:count]
