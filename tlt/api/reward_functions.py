"""Hand functions of a program to the processes that score."""

import hashlib
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, overload

import cloudpickle

from tlt.errors import ConfigError
from tlt.rewards.kinds.reward_functions import PICKLED

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
        try:
            setattr(marked, _SETTINGS, settings)
        except AttributeError as error:
            kind = type(marked).__name__
            raise ConfigError(f"tlt.reward: a {kind} can't be marked: use a function") from error
        return marked

    return mark if function is None else mark(function)


def reward_section(function: Callable[..., Any], folder: Path) -> dict[str, Any]:
    """Return a spec's section for a function, which is written to a file of `folder`."""
    name = getattr(function, "__name__", type(function).__name__).strip("<>")
    # a function of an importable module is a reference to it, which needs this program's path
    path = [str(Path(entry or ".").resolve()) for entry in sys.path]
    try:
        data = pickle.dumps((path, cloudpickle.dumps(function)))
    except Exception as error:  # raised by what the function holds
        raise ConfigError(f"the reward {name} can't be written down: {error}") from error
    file = folder / f"{name}-{hashlib.sha256(data).hexdigest()[:16]}{PICKLED}"
    file.write_bytes(data)
    settings = getattr(function, _SETTINGS, {})
    return {"kind": "function", "name": name, "function": f"{file}:{name}"} | settings
