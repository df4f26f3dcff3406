"""Measure how long a worker writes nothing, because all of its answers wait for environments."""

import time
from collections.abc import Callable


class ToolClock:
    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._at = now()
        self._seconds = 0.0
        # answers, and those of them that wait
        self._answers = self._waiting = 0

    def take(self) -> float:
        """Return the seconds since it was asked last."""
        self._pass_time()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def change(self, *, answers: int = 0, waiting: int = 0) -> None:
        """Note that so many more answers are open, or wait."""
        self._pass_time()
        self._answers += answers
        self._waiting += waiting

    def _pass_time(self) -> None:
        now = self._now()
        if self._answers == self._waiting > 0:
            self._seconds += now - self._at
        self._at = now


class Wait:
    """Tells the clock if an answer waits for its environment, as it does when it begins."""

    def __init__(self, clock: ToolClock) -> None:
        self.is_on = True
        self._clock = clock
        clock.change(answers=1, waiting=1)

    def switch(self, is_on: bool) -> None:
        self._clock.change(waiting=is_on - self.is_on)
        self.is_on = is_on

    def end(self) -> None:
        """Forget the answer."""
        self._clock.change(answers=-1, waiting=-self.is_on)
