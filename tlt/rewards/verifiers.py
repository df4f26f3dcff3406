"""Verifiers map an answer to its reward; the built-in ones return 1 or 0."""

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from tlt.config import RewardSpec
from tlt.dataset import Row
from tlt.errors import ConfigError

# what a user's function may ask for beside completion, answer and row
OPTIONAL = frozenset({"tokens", "length", "stop"})


class Verifier(Protocol):
    def __call__(self, text: str, answer: Any, row: Row, /, **known: Any) -> float:
        """Return the reward; `known` has what `OPTIONAL` names, as far as it is wanted."""
        ...


_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_BOXED = "\\boxed{"


def load_verifier(spec: RewardSpec) -> Verifier:
    match spec.kind:
        case "final_answer":
            return lambda text, answer, row, **_: float(_after(text, spec.marker) == _text(answer))
        case "numeric":
            return lambda text, answer, row, **_: float(
                _same_number(_last_number(text), _last_number(_text(answer)), spec.tolerance)
            )
        case "regex":
            pattern = _compiled(spec.pattern or "")
            return lambda text, answer, row, **_: float(_captured(pattern, text) == _text(answer))
        case "boxed":
            return lambda text, answer, row, **_: float(_boxed(text) == _text(answer))
        case "function":
            return _load_function(spec.function or "")


def _load_function(dotted: str) -> Verifier:
    """Load a user's `def reward(completion, answer, row)` by name.

    It may have the parameters `tokens`, `length` (of tokens) and `stop` ("stop" or "length"), too.
    """
    source, _, name = dotted.rpartition(":")
    if not source or not name:
        raise ConfigError(f"reward.function: '{dotted}': write package.module:name or file.py:name")
    module = _import_file(Path(source)) if source.endswith(".py") else _import_module(source)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"reward.function: {source} has no function '{name}'")

    wanted = _optional_parameters(function)

    def verify(text: str, answer: Any, row: Row, /, **known: Any) -> float:
        asked = {name: value for name, value in known.items() if name in wanted}
        reward: Any = function(completion=text, answer=answer, row=row, **asked)
        return float(reward)

    verify.wanted = wanted  # pyright: ignore[reportFunctionMemberAccess]
    return verify


def wanted_by(verifier: Verifier) -> frozenset[str]:
    """Return which of `OPTIONAL` a verifier asks for."""
    return getattr(verifier, "wanted", frozenset())


def _optional_parameters(function: Callable[..., object]) -> frozenset[str]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a built-in without a signature
        return frozenset()
    return OPTIONAL & parameters.keys()


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


def _text(answer: Any) -> str:
    return str(answer).strip()


def _after(text: str, marker: str) -> str | None:
    _, separator, rest = text.rpartition(marker)
    return rest.strip() if separator else None


def _last_number(text: str) -> float | None:
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def _same_number(left: float | None, right: float | None, tolerance: float) -> bool:
    if left is None or right is None:
        return False
    return abs(left - right) <= tolerance * max(1.0, abs(right))


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"reward.pattern: '{pattern}': {error}") from error


def _captured(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the last match's first group, or the whole match if the pattern has no group."""
    last = None
    for match in pattern.finditer(text):
        last = match
    if last is None:
        return None
    captured = last.group(1) if pattern.groups else last.group(0)
    return None if captured is None else captured.strip()


def _boxed(text: str) -> str | None:
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    depth = 1
    begin = start + len(_BOXED)
    for index in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[begin:index].strip()
    return None
