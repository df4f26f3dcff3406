"""The base of a spec's sections."""

import difflib
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of a spec's sections; a section checks its bounds in `__post_init__`."""


def require(holds: bool, complaint: str) -> None:
    if not holds:
        raise ValueError(complaint)


def suggestion(name: str, known: Collection[str]) -> str:
    """Return what to write in place of an unknown name."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known)}"


def unwritable_numbers(value: object, at: str = "") -> Iterator[str]:
    """Yield where a section holds numbers that JSON or MessagePack can't: infinite or too large."""
    if isinstance(value, float | int) and not abs(value) < 2**63:
        yield at
    elif isinstance(value, msgspec.Struct):
        yield from unwritable_numbers(msgspec.structs.asdict(value), at)
    elif isinstance(value, Mapping):
        for key, each in typing.cast("Mapping[object, object]", value).items():
            yield from unwritable_numbers(each, f"{at}.{key}" if at else str(key))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, each in enumerate(typing.cast("Sequence[object]", value)):
            yield from unwritable_numbers(each, f"{at}[{index}]")


def section_of(kind: Any) -> type[Section] | None:
    """Return the section that a field holds: one of it, or several in a list or by name."""
    kinds = typing.get_args(kind) or (kind,)
    kinds = (*kinds, *(named for each in kinds if (named := _named(each)) is not None))
    kinds += tuple(each for k in kinds for each in typing.get_args(k))
    sections = (k for k in kinds if isinstance(k, type) and issubclass(k, Section))
    return next(sections, None)


def holds_named_sections(kind: Any) -> bool:
    """Return True if a field may map names to sections."""
    return any(_named(each) is not None for each in typing.get_args(kind))


def _named(kind: Any) -> Any:
    """Return what `dict[str, X]` holds."""
    return typing.get_args(kind)[1] if typing.get_origin(kind) is dict else None
