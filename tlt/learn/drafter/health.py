"""A drafter diverges if its lessons no longer count, or if it has unlearned much of what it knew.

A median of the last losses is compared with the best there was, which is forgotten little by
little: what a policy that moves makes harder to guess is no illness.
"""

from collections import deque
from statistics import median

from tlt.learn.drafter.learner import Lesson

_SKIPPED = 5
_WINDOW = 15
# how far above the best one a median is too far: a part of the best, and nats
_PART, _NATS = 0.5, 0.5
# of what lies between, the best takes over this with each lesson
_FORGOTTEN = 1 / 500


class Health:
    def __init__(self) -> None:
        self._skipped = 0
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._best: float | None = None

    def note(self, lesson: Lesson) -> None:
        self._skipped = self._skipped + 1 if lesson.skipped else 0
        if lesson.skipped:
            return
        self._losses.append(lesson.loss)
        if len(self._losses) == _WINDOW:
            usual = median(self._losses)
            best = usual if self._best is None else self._best
            self._best = min(usual, best + (usual - best) * _FORGOTTEN)

    def complaint(self) -> str | None:
        """In a few words, why the training should start over; nothing, if it shouldn't."""
        if self._skipped >= _SKIPPED:
            return f"{self._skipped} lessons in a row were not finite"
        if self._best is None:
            return None
        usual = median(self._losses)
        if usual > self._best * (1 + _PART) + _NATS:
            return f"its loss is {usual:.2f}, and was {self._best:.2f}"
        return None
