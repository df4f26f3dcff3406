"""The base of a spec's sections."""

import typing
from typing import Any

import msgspec


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of a spec's sections; a section checks its bounds in `__post_init__`."""


def require(holds: bool, complaint: str) -> None:
    if not holds:
        raise ValueError(complaint)


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
