"""Work that takes long calls a look now and then: what that raises ends it."""

from collections.abc import Callable

# In a backward pass on a GPU it is called from a thread of autograd's.
Look = Callable[[], None]


class Interrupted(Exception):
    """What a look raises to have the work given up; anything else does as well."""


def nothing() -> None:
    """Seen by nobody."""
