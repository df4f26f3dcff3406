"""Work that takes long calls a look now and then: what that raises ends it."""

from collections.abc import Callable

# In a backward pass on a GPU it is called from a thread of autograd's.
CheckInterrupt = Callable[[], None]


class Interrupted(Exception):
    """What a look raises to have the work given up; anything else does as well."""


def never_interrupt() -> None:
    """Seen by nobody."""
