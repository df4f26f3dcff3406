"""Parts of every fault: what it may use, what it returns, and how it kills, stops and waits."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

from tests.chaos.checks import Key
from tests.chaos.session import Session, until
from tlt.base.end_session_processes import identify, is_running


class NotNow(Exception):
    """The job has nothing at the moment that the fault could hit."""


@dataclass
class Chaos:
    """The session and the job that a fault hits, and what faults have done to that job."""

    session: Session
    dice: Random
    job: str = ""
    # answers that were damaged on the disk
    damaged: set[Key] = field(default_factory=set[Key])
    # what a refused job must name in its error
    refusal: str | None = None
    # when the session could begin to recover
    freed_at: float = 0.0

    def free(self) -> None:
        """Note that from now on the session can recover."""
        self.freed_at = time.monotonic()


# what has to be true before the session is back at work, beside all processes being up
Healed = Callable[[], bool] | None
Fault = Callable[[Chaos], Healed]


def kill(*pids: int) -> None:
    """Kill processes, and wait for their end."""
    found = [process for pid in pids if (process := identify(pid)) is not None]
    for process in found:
        os.kill(process.pid, signal.SIGKILL)
    until(lambda: not any(map(is_running, found)), "the killed processes to end")


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Stop processes meanwhile; one that was killed meanwhile isn't continued."""
    found = [process for pid in pids if (process := identify(pid)) is not None]
    for process in found:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in found:
            if is_running(process):
                os.kill(process.pid, signal.SIGCONT)


def hold(seconds: float, over: Callable[[], bool] = lambda: False) -> None:
    """Let a fault last, because its length is what it is about, or until it has had its effect."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not over():
        time.sleep(0.05)
