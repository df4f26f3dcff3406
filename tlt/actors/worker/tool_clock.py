"""Measure how long ranks write nothing, because all of their answers wait for environments."""

import time
from collections import Counter
from collections.abc import Callable, Hashable


class ToolClock:
    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._at = now()
        self._seconds = 0.0
        # by rank: its answers, and those of them that wait
        self._answers = Counter[Hashable]()
        self._waiting = Counter[Hashable]()

    def take(self) -> float:
        """Return the seconds since it was asked last, of all ranks together."""
        self._pass_time()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def change(self, rank: Hashable, *, answers: int = 0, waiting: int = 0) -> None:
        """Note that so many more of a rank's answers are open, or wait."""
        self._pass_time()
        self._answers[rank] += answers
        self._waiting[rank] += waiting

    def _pass_time(self) -> None:
        now = self._now()
        idle = sum(answers == self._waiting[rank] > 0 for rank, answers in self._answers.items())
        self._seconds += idle * (now - self._at)
        self._at = now


class Wait:
    """Tells the clock if an answer waits for its environment, as it does when it begins."""

    def __init__(self, clock: ToolClock, rank: Hashable) -> None:
        self.is_on = True
        self._clock = clock
        self._rank = rank
        clock.change(rank, answers=1, waiting=1)

    def switch(self, is_on: bool) -> None:
        self._clock.change(self._rank, waiting=is_on - self.is_on)
        self.is_on = is_on

    def end(self) -> None:
        """Forget the answer."""
        self._clock.change(self._rank, answers=-1, waiting=-self.is_on)
