"""A stand-in for Triton: SGLang's kernels are defined on import and never launched.

Every submodule and every name in it exist: a capitalised name is a class, another a decorator.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from tlt.engine.sglang.cpu.raising_placeholder_ops import MissingKernel

__version__ = "0.0.0"


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    return MissingKernel if function is None else MissingKernel(function)


def _decorator(*arguments: Any, **options: Any) -> Any:
    return lambda function: function


autotune = heuristics = _decorator


class Config:
    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.kwargs = arguments[0] if arguments else {}


def cdiv(dividend: int, divisor: int) -> int:
    return -(dividend // -divisor)


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


class _Submodule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _resolve(self.__name__, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else _decorator()


class _Submodules(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith("triton."):
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Submodule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(_Submodules())


def _resolve(module: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    full = f"{module}.{name}"
    if name[0].isupper():
        value = type(name, (), {"__module__": module})
    else:
        value = importlib.import_module(full)
    setattr(sys.modules[module], name, value)
    return value


def __getattr__(name: str) -> Any:
    return _resolve(__name__, name)
