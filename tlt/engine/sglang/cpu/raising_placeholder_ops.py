"""Placeholders for kernels without a stand-in: importable, and an error when they are called."""

from collections.abc import Callable
from typing import Any, NoReturn


class MissingOp(NotImplementedError, AttributeError):
    """A call of a missing kernel; an AttributeError too, as SGLang probes kernels by `hasattr`."""


def missing(name: str) -> Callable[..., Any]:
    def unavailable(*arguments: Any, **options: Any) -> NoReturn:
        raise MissingOp(f"{name} has no CPU stand-in")

    return unavailable


class MissingKernel:
    """A Triton kernel: importing SGLang defines hundreds, and none is launched on a CPU."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function
        self._name = f"{function.__module__}.{function.__qualname__}"

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return missing(f"the Triton kernel {self._name}")

    def __call__(self, *arguments: Any, **options: Any) -> NoReturn:
        raise MissingOp(f"the Triton kernel {self._name} has no CPU stand-in")
