"""The base of a spec's sections."""

import msgspec


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of a spec's sections; a section checks its bounds in `__post_init__`."""


def require(holds: bool, complaint: str) -> None:
    if not holds:
        raise ValueError(complaint)
