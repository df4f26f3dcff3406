"""Hand functions of a program to the processes that score: by their file, or written down."""

import hashlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, overload

import cloudpickle

from tlt.errors import ConfigError
from tlt.rewards.reward_functions import PICKLED

_SETTINGS = "__tlt_reward__"
_Function = TypeVar("_Function", bound=Callable[..., Any])


@overload
def reward(function: _Function) -> _Function: ...


@overload
def reward(**settings: Any) -> Callable[[_Function], _Function]: ...


def reward(function: Any = None, **settings: Any) -> Any:
    """Mark a function of `(completion, answer, row)` or of lists of them as a reward.

    Settings are keys of the spec's `reward` section: `@tlt.reward(weight=0.2, network=True)`.
    The function may be async, and it stays what it is.
    """

    def mark(marked: _Function) -> _Function:
        setattr(marked, _SETTINGS, settings)
        return marked

    return mark if function is None else mark(function)


def reward_section(function: Callable[..., Any], folder: Path) -> dict[str, Any]:
    """Return a spec's section for a function, which is written to `folder` if no file has it."""
    settings = getattr(function, _SETTINGS, {})
    name = getattr(function, "__name__", type(function).__name__)
    file = _file_of(function)
    if file is None:
        file = _write(function, name, folder)
    return {"kind": "function", "name": name, "function": f"{file}:{name}"} | settings


def _file_of(function: Callable[..., Any]) -> Path | None:
    """Return the file that has the function at its top level and may be loaded again.

    A program's main file isn't loaded again, because that would run the program.
    """
    module = sys.modules.get(getattr(function, "__module__", ""))
    found = getattr(module, getattr(function, "__qualname__", ""), None)
    file = getattr(module, "__file__", None)
    if file is None or found is not function or getattr(module, "__name__", "") == "__main__":
        return None
    return Path(inspect.getfile(function)).resolve()


def _write(function: Callable[..., Any], name: str, folder: Path) -> Path:
    try:
        data = cloudpickle.dumps(function)
    except Exception as error:  # raised by what the function holds
        raise ConfigError(f"the reward {name} can't be written down: {error}") from error
    file = folder / f"{name}-{hashlib.sha256(data).hexdigest()[:16]}{PICKLED}"
    file.write_bytes(data)
    return file
