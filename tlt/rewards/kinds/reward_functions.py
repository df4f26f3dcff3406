"""Load users' reward functions: of one answer or of many, sync or async."""

import asyncio
import importlib
import importlib.util
import inspect
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tlt.errors import ConfigError

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
    if not source or not name:
        raise ConfigError(f"reward.function: '{dotted}': write package.module:name or file.py:name")
    function = _find(source, name)
    if not callable(function):
        raise ConfigError(f"reward.function: {source} has no function '{name}'")
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a built-in without a signature
        parameters = {}
    batched = "completions" in parameters
    optional = OPTIONAL_OF_MANY if batched else OPTIONAL
    wanted = {key: known for key, known in optional.items() if key in parameters}
    return RewardFunction(_waiting(function), batched, wanted)


def _find(source: str, name: str) -> Any:
    if source.endswith(PICKLED):
        return _unpickle(Path(source))
    module = _import_file(Path(source)) if source.endswith(".py") else _import_module(source)
    return getattr(module, name, None)


def _unpickle(path: Path) -> Any:
    """Load a function; like a file of Python, it's code that the spec's author chose."""
    try:
        modules, function = pickle.loads(path.read_bytes())
        sys.path.extend(entry for entry in modules if entry not in sys.path)
        return pickle.loads(function)
    except Exception as error:  # raised by what the function needs
        raise ConfigError(
            f"reward.function: {path} cannot be loaded: {type(error).__name__}: {error}"
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


def _import_module(dotted: str) -> ModuleType:
    try:
        return importlib.import_module(dotted)
    except (Exception, SystemExit) as error:  # raised by the user's code
        raise ConfigError(
            f"reward.function: {dotted} cannot be imported: {type(error).__name__}: {error}"
        ) from error


def _import_file(path: Path) -> ModuleType:
    name = f"reward_file_{path.stem}"  # a file may have the name of an imported module
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"reward.function: {path}: no such file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # last, because a file beside it may have the name of a standard module
    sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # raised by the user's code
        raise ConfigError(
            f"reward.function: {path} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    return module
