"""Say what a part runs on: the device, its data sheet, a folder in memory, and shapes that fit.

PyTorch is imported where it is needed, so that a process starts at once.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from benchmarks.random_policy import Sizes


class DataSheet(NamedTuple):
    # bytes and floating-point operations a second
    bandwidth: float
    bfloat16: float
    # from the call of an operation until the next one can be called
    launch: float


# Vendors' data sheets, dense. A launch in eager PyTorch takes the host about 5 microseconds.
_SHEETS = {
    "H200": DataSheet(4.8e12, 989e12, 5e-6),
    "H100": DataSheet(3.35e12, 989e12, 5e-6),
    "A100": DataSheet(2.04e12, 312e12, 5e-6),
}
_UNKNOWN = DataSheet(math.nan, math.nan, math.nan)
# one core, measured; products are those of float32
_CPU = DataSheet(10e9, 70e9, 2e-6)
# bytes of weights or deltas that reach an engine in a second: a third of a copy's in memory
MOVED = 3e9


class Machine(NamedTuple):
    # cuda or cpu
    name: str
    # in memory; policies in it outlive the process
    folder: Path

    @property
    def has_gpu(self) -> bool:
        return self.name == "cuda"

    @property
    def device(self) -> "torch.device":
        import torch

        return torch.device(self.name, 0) if self.has_gpu else torch.device(self.name)

    @property
    def dtype(self) -> "torch.dtype":
        """Return the type that engines compute in by default."""
        import torch

        return torch.bfloat16 if self.has_gpu else torch.float32

    @property
    def sheet(self) -> DataSheet:
        if not self.has_gpu:
            return _CPU
        import torch

        name = torch.cuda.get_device_name(self.device)
        return next((sheet for key, sheet in _SHEETS.items() if key in name), _UNKNOWN)

    def now(self) -> float:
        """Return wall seconds, once the device has done its work."""
        if self.has_gpu:
            import torch

            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def seconds_of(self, action: Callable[[], object], times: int) -> float:
        """Return the mean duration of an action, after a warm-up."""
        action()
        began = self.now()
        for _ in range(times):
            action()
        return (self.now() - began) / times

    def policy(self, sizes: "Sizes | None" = None) -> Path:
        """Return the folder of a policy, made on the device when it is first asked for.

        By default it has the shape of Qwen2.5-1.5B on a GPU, and a tiny one on a CPU.
        """
        from benchmarks.random_policy import ONE_AND_A_HALF_BILLION, TINY, write_policy

        sizes = sizes or (ONE_AND_A_HALF_BILLION if self.has_gpu else TINY)
        folder = self.folder / "-".join(map(str, ("policy", *sizes)))
        # the last file that is written
        if not (folder / "tokenizer_config.json").exists():
            write_policy(folder, sizes, self.device, self.dtype)
        return folder
