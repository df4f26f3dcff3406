"""What has no stand-in can be imported, and names itself when it is used."""

from collections.abc import Callable
from typing import Any, NoReturn


class MissingOp(NotImplementedError, AttributeError):
    """Also an AttributeError: SGLang asks with `hasattr` what a build of its kernels can do."""


def missing(name: str) -> Callable[..., Any]:
    def unavailable(*arguments: Any, **options: Any) -> NoReturn:
        raise MissingOp(f"{name} has no CPU stand-in")

    return unavailable


class MissingKernel:
    """A Triton kernel: SGLang defines hundreds as it is imported and starts none on a CPU."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function
        self._name = f"{function.__module__}.{function.__qualname__}"

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return missing(f"the Triton kernel {self._name}")

    def __call__(self, *arguments: Any, **options: Any) -> NoReturn:
        raise MissingOp(f"the Triton kernel {self._name} has no CPU stand-in")
