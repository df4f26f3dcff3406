"""A drafter diverges if its lessons no longer count, or if it has forgotten much of what it knew.

What it knows is the part of the policy's distribution that its first guess covers: all of it if it
is perfect, whether answers are easy or hard. (Its loss has the policy's own doubt in it, and would
rise with that.) A median of the last lessons is compared with the best there was, which fades
little by little: what a policy that moves makes harder to guess is no illness. What is ruined
before there was a median is for a canary to find.
"""

from collections import deque
from statistics import median

from tlt.trainer.drafter.drafter_learner import MicroBatchResult

_SKIPPED = 5
_WINDOW = 15
# of the best, and less this: where next to nothing was known, nothing can be forgotten
_PART, _LITTLE = 0.5, 0.05
# of what lies between, the best gives this up with each lesson
_FADES = 1 / 500


class DivergenceDetector:
    def __init__(self) -> None:
        self._skipped = 0
        self._covered: deque[float] = deque(maxlen=_WINDOW)
        self._best: float | None = None

    def note(self, lesson: MicroBatchResult) -> None:
        self._skipped = self._skipped + 1 if lesson.skipped else 0
        if lesson.skipped:
            return
        self._covered.append(lesson.overlap[0])
        if len(self._covered) == _WINDOW:
            usual = median(self._covered)
            best = usual if self._best is None else self._best
            self._best = max(usual, best + (usual - best) * _FADES)

    def complaint(self) -> str | None:
        """In a few words, why the training should start over; nothing, if it shouldn't."""
        if self._skipped >= _SKIPPED:
            return f"{self._skipped} lessons in a row were not finite"
        if self._best is None:
            return None
        usual = median(self._covered)
        if usual < self._best * _PART - _LITTLE:
            return f"it covers {usual:.0%} of the policy's guesses, and covered {self._best:.0%}"
        return None
