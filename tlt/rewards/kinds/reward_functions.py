"""Load users' reward functions: of one answer or of many, sync or async."""

import asyncio
import inspect
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt.base.own_functions import load_own_function
from tlt.errors import ConfigError

_KEY = "reward.function"
# ending of a file that holds one function which cloudpickle has written
PICKLED = ".cloudpickle"
# what a function may ask for beside completion, answer and row: by the name of its parameter
OPTIONAL: Mapping[str, str] = {name: name for name in ("tokens", "length", "stop")}
OPTIONAL_OF_MANY: Mapping[str, str] = {"tokens": "tokens", "lengths": "length", "stops": "stop"}


@dataclass(frozen=True)
class RewardFunction:
    """A function `(completion, answer, row)`, or `(completions, answers, rows)` of lists.

    It may have the parameters `tokens`, `length` (of tokens) and `stop` ("stop" or "length") too,
    or `tokens`, `lengths` and `stops`.
    """

    call: Callable[..., Any]
    batched: bool
    # by parameter: the name of what it wants
    wanted: Mapping[str, str]


def load_function(dotted: str) -> RewardFunction:
    """Load `package.module:name`, `file.py:name` or what the API has written of a function."""
    source, _, name = dotted.rpartition(":")
    if source.endswith(PICKLED):
        function = _unpickle(Path(source))
        if not callable(function):
            raise ConfigError(f"{_KEY}: {source} has no function '{name}'")
    else:
        function = load_own_function(_KEY, dotted)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a built-in without a signature
        parameters = {}
    batched = "completions" in parameters
    optional = OPTIONAL_OF_MANY if batched else OPTIONAL
    wanted = {key: known for key, known in optional.items() if key in parameters}
    return RewardFunction(_waiting(function), batched, wanted)


def _unpickle(path: Path) -> Any:
    """Load a function; like a file of Python, it's code that the spec's author chose."""
    try:
        modules, function = pickle.loads(path.read_bytes())
        sys.path.extend(entry for entry in modules if entry not in sys.path)
        return pickle.loads(function)
    except Exception as error:  # raised by what the function needs
        raise ConfigError(
            f"{_KEY}: {path} cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def _waiting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that waits for what an async one returns.

    The loop stays the same, so that a module may keep a client between calls.
    """
    runner: asyncio.Runner | None = None

    def call(**arguments: Any) -> Any:
        nonlocal runner
        result = function(**arguments)
        if not inspect.isawaitable(result):
            return result
        if runner is None:
            runner = asyncio.Runner()

        async def wait() -> Any:
            return await result

        return runner.run(wait())

    return call
