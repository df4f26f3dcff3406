"""Describe the moves that may come next in the simulated world."""

from typing import Any, NamedTuple


class Move(NamedTuple):
    """A method of a part of the world with its arguments."""

    kind: str
    args: tuple[Any, ...] = ()
