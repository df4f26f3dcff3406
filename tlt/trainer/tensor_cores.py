"""Let training in float32 use a GPU's tensor cores (TF32), which is about ten times as fast.

Sums stay in float32, and factors keep ten bits. An engine that decodes in float32 doesn't use them.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class OnDevice(Protocol):
    @property
    def device(self) -> torch.device:
        """Return the device that computes."""
        ...


_Self = TypeVar("_Self", bound=OnDevice)


@contextmanager
def tensor_cores(device: torch.device) -> Generator[None]:
    """Allow TF32 while the body runs; on a CPU nothing changes."""
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def uses_tensor_cores(
    method: Callable[Concatenate[_Self, _Arguments], _Result],
) -> Callable[Concatenate[_Self, _Arguments], _Result]:
    """Allow TF32 while the method runs."""

    @wraps(method)
    def run(self: _Self, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with tensor_cores(self.device):
            return method(self, *args, **kwargs)

    return run
