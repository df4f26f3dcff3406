"""Long work calls a check now and then; the check ends the work by raising."""

from collections.abc import Callable

# in a backward pass on a GPU it is called from a thread of autograd's
CheckInterrupt = Callable[[], None]


class Interrupted(Exception):
    """Raised by a check to give the work up; any other exception does so as well."""


def never_interrupt() -> None:
    """Let the work go on."""
