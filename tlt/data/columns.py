"""Read columns of rows: by name, or where no column has that name by a path through mappings."""

from collections.abc import Iterator, Mapping
from typing import Any

from tlt.errors import DataError
from tlt.spec.prompt_files import Column, PromptFile

_MOST_NAMES = 40


def column_of(row: Mapping[str, Any], name: str) -> Any:
    """Return a column such as `answer` or `reward_model.ground_truth`, or raise KeyError."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise KeyError(name)
        value = value[part]
    return value


def find_column(row: Mapping[str, Any], name: str) -> Any:
    """Return a column, or None where a row has none."""
    try:
        return column_of(row, name)
    except KeyError:
        return None


def require_column(row: Mapping[str, Any], column: Column, location: str) -> Any:
    """Return a column, or raise DataError with the spec's key and the columns that there are."""
    try:
        return column_of(row, column.name)
    except KeyError:
        raise lack_of_column(row, column, location) from None


def lack_of_column(row: Mapping[str, Any], column: Column, location: str) -> DataError:
    names = [name for name, _ in zip(_names(row), range(_MOST_NAMES + 1), strict=False)]
    listed = ", ".join(sorted(names[:_MOST_NAMES])) + (", …" if len(names) > _MOST_NAMES else "")
    what = f"no key '{column.name}' ({column.key})"
    return DataError(f"{location}: {what}; it has {listed or 'none'}")


def _names(value: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of columns, and the paths of those that are nested."""
    for name, each in value.items():
        if isinstance(each, Mapping) and each:
            yield from (f"{name}.{nested}" for nested in _names(each))
        else:
            yield name


def sources_of(row: Mapping[str, Any], file: PromptFile, location: str) -> tuple[str, ...]:
    """Return the names that rewards know a row by: its set's or source's, and that in its column.

    A row without a value in the column has the first name alone.
    """
    name = None if file.source is None else find_column(row, file.source.name)
    if file.source is None or name is None:
        return (file.name,)
    if not isinstance(name, str):
        raise DataError(f"{location}: '{file.source.name}' is no text ({file.source.key})")
    return (file.name, name)
