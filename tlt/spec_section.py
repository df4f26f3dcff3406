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
    """Return the section that a field holds: one of it, or a list of several."""
    kinds = typing.get_args(kind) or (kind,)
    sections = (k for k in kinds if isinstance(k, type) and issubclass(k, Section))
    return next(sections, None)
