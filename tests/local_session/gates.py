"""Hold fake ranks at a point until the test lets them go on: a file's lock is the gate.

A rank that comes to a gate waits in the kernel, as one that computes for long; it can be killed.
"""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

_FOLDER = "gates"


class Gates:
    """The gates of a session; its ranks find them beside its folder in shared memory."""

    def __init__(self, flight: Path) -> None:
        self._folder = flight.with_name(_FOLDER)

    def wait(self, point: str, who: str) -> None:
        """Wait as long as the test holds this point, and leave a note of having come there."""
        try:
            gate = open(self._folder / point, "rb")  # noqa: SIM115
        except FileNotFoundError:
            return
        with gate:
            (self._folder / f"{point}@{who}").touch()
            fcntl.flock(gate, fcntl.LOCK_SH)

    @contextlib.contextmanager
    def hold(self, point: str) -> Iterator[None]:
        """Let no rank pass this point while the body runs."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / point
        with open(path, "wb") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            try:
                yield
            finally:
                path.unlink()

    def arrived(self, point: str) -> set[str]:
        """Return who has come to a point since the test began to hold it."""
        return {path.name.partition("@")[2] for path in self._folder.glob(f"{point}@*")}
