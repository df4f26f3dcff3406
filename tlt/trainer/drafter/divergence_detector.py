"""A drafter diverges if its updates are skipped in a row, or if it loses much of what it knew.

What it knows is its overlap with the policy's distribution at the first guess: 1 for a perfect
drafter, whether answers are easy or hard. (Its loss contains the policy's own entropy and would
rise with it.) The median of the last micro-batches is compared with the best median so far, which
decays slowly, because a policy that changes may become harder to guess. A drafter that is broken
before there is a first median is left to the evaluation.
"""

from collections import deque
from statistics import median

from tlt.trainer.drafter.drafter_learner import MicroBatchResult

_MOST_SKIPPED = 5
_WINDOW = 15
# lowest sound overlap: this part of the best, less a margin for drafters that know next to nothing
_PART_OF_BEST, _MARGIN = 0.5, 0.05
# part of its lead over the present median that the best loses with each micro-batch
_DECAY = 1 / 500


class DivergenceDetector:
    def __init__(self) -> None:
        self._skipped = 0
        self._overlaps: deque[float] = deque(maxlen=_WINDOW)
        self._best: float | None = None

    def record(self, result: MicroBatchResult) -> None:
        self._skipped = self._skipped + 1 if result.skipped else 0
        if result.skipped:
            return
        self._overlaps.append(result.overlap[0])
        if len(self._overlaps) == _WINDOW:
            present = median(self._overlaps)
            best = present if self._best is None else self._best
            self._best = max(present, best + (present - best) * _DECAY)

    def divergence(self) -> str | None:
        """Return in a few words why training should start over, or None if it is sound."""
        if self._skipped >= _MOST_SKIPPED:
            return f"{self._skipped} micro-batches in a row were not finite"
        if self._best is None:
            return None
        present = median(self._overlaps)
        if present < self._best * _PART_OF_BEST - _MARGIN:
            return f"it covers {present:.0%} of the policy's guesses, and covered {self._best:.0%}"
        return None
