"""Make rows of reasoning-gym's tasks: `reasoning_gym:chain_sum?max_terms=2&seed=1&size=2000`.

A source is its task, and the parameters of that task's configuration as JSON or text. Row by row it
is made again from them wherever it is scored.
"""

import dataclasses
import typing
from collections.abc import Iterator
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from tlt.errors import DataError
from tlt.spec.data_and_algorithm import GYM
from tlt.spec.section import suggestion

# the column with a row's source and index, from which it is made again
MADE_BY = "made_by"


class MadeBy(msgspec.Struct, frozen=True):
    source: str
    index: int


def gym_rows(source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row with its location; `prompt` is the question, by the name that specs expect."""
    dataset = open_dataset(source)
    for index in range(len(dataset)):
        entry = _as_json(dataset[index])
        made_by = MadeBy(source=source, index=index)
        row = {"prompt": entry["question"], **entry, MADE_BY: msgspec.to_builtins(made_by)}
        yield f"{source}: row {index + 1}", row


@lru_cache(maxsize=64)
def open_dataset(source: str) -> Any:
    """Return the data set of a source, which makes its rows when they are asked for."""
    name, _, query = source.removeprefix(GYM).partition("?")
    known = import_gym(source).factory.DATASETS
    if name not in known:
        raise DataError(f"{source}: no task '{name}'; {suggestion(name, sorted(known))}")
    make, configuration = known[name]
    try:
        return make(config=configuration(**_parameters(source, query, configuration)))
    except (AssertionError, ValueError, TypeError) as error:
        raise DataError(f"{source}: {_one_line(error)}") from error


@lru_cache(maxsize=1024)
def entry_of(source: str, index: int) -> dict[str, Any]:
    """Return a row as reasoning-gym makes it, with the types that JSON doesn't have."""
    return open_dataset(source)[index]


def import_gym(who: str) -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        advice = "pip install 'tlt-rl[reasoning-gym]'"
        raise DataError(f"{who}: this needs reasoning-gym ({error}): {advice}") from error
    return reasoning_gym


def _parameters(source: str, query: str, configuration: Any) -> dict[str, Any]:
    kinds = typing.get_type_hints(configuration)
    names = [field.name for field in dataclasses.fields(configuration)]
    found: dict[str, Any] = {}
    for key, text in parse_qsl(query, keep_blank_values=True):
        if key not in names:
            raise DataError(f"{source}: no parameter '{key}'; {suggestion(key, names)}")
        if key in found:
            raise DataError(f"{source}: '{key}' is there twice")
        found[key] = _value(f"{source}: {key}", text, kinds[key])
    if "seed" in names and found.get("seed") is None:
        raise DataError(
            f"{source}: name a seed, such as seed=1: row i is made from seed + i, so sets that "
            "share no rows have seeds that lie further apart than their sizes"
        )
    return found


def _value(where: str, text: str, kind: Any) -> Any:
    """Read JSON of the parameter's type, or a text as it is."""
    try:
        value = msgspec.json.decode(text)
    except ValueError:
        value = text
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise DataError(f"{where}={text}: {error}") from error
    except TypeError:  # a type of reasoning-gym's own
        return value


def _as_json(entry: dict[str, Any]) -> dict[str, Any]:
    return msgspec.to_builtins(entry, enc_hook=_plain, str_keys=True)


def _plain(value: Any) -> Any:
    """Return a number or text of numpy as Python's, and the text of anything else."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
