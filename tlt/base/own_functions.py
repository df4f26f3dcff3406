"""Load a function of the user's, which a spec names as `package.module:name` or `file.py:name`."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tlt.errors import ConfigError


def load_own_function(key: str, dotted: str) -> Callable[..., Any]:
    """Raise ConfigError, with the spec's key, if there is no such function."""
    source, _, name = dotted.rpartition(":")
    if not source or not name:
        raise ConfigError(f"{key}: '{dotted}': write package.module:name or file.py:name")
    module = _import_file(key, Path(source)) if source.endswith(".py") else _import(key, source)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{key}: {source} has no function '{name}'")
    return function


def load_tensor_function(key: str, dotted: str) -> Callable[..., Any]:
    """Load a function that ranks call; what it raises names the spec's key and ends the job."""
    function = load_own_function(key, dotted)

    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            raise ConfigError(f"{key}: {dotted}: {type(error).__name__}: {error}") from error

    return call


def _import(key: str, dotted: str) -> ModuleType:
    try:
        return importlib.import_module(dotted)
    except (Exception, SystemExit) as error:  # raised by the user's code
        raise ConfigError(_complaint(key, dotted, error)) from error


def _import_file(key: str, path: Path) -> ModuleType:
    name = f"own_file_{path.stem}"  # a file may have the name of an imported module
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"{key}: {path}: no such file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # last, because a file beside it may have the name of a standard module
    sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # raised by the user's code
        raise ConfigError(_complaint(key, str(path), error)) from error
    return module


def _complaint(key: str, source: str, error: BaseException) -> str:
    return f"{key}: {source} cannot be imported: {type(error).__name__}: {error}"
