"""Start child processes that end when their parent ends."""

import ctypes
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_LONGEST_LINE = 1000
_libc = ctypes.CDLL(None)


def die_with_parent(how: signal.Signals) -> Callable[[], None]:
    """Return a `preexec_fn`; the signal follows the *thread* that starts the child."""

    def before_exec() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, how)

    return before_exec


def last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1][:_LONGEST_LINE] if lines else "it said nothing"
