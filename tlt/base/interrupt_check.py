"""Long work calls a check regularly, and the check ends it by raising an exception."""

from collections.abc import Callable

# in a backward pass on a GPU one of autograd's threads calls it
CheckInterrupt = Callable[[], None]


class Interrupted(Exception):
    """A check raises it to end the work; any other exception has the same effect."""


def never_interrupt() -> None:
    """Never end the work."""
