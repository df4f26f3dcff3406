"""Fit micro-batches to a time limit, because a stop drops the one in progress.

The limit grows with the drafter's updates: an untrained drafter learns more from many small updates
than from few large ones, and a trained one the other way round.
"""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

# a drafter of one layer reaches an accept length of 3 in 3 s instead of 4.3 s (`docs/adr/14`)
_FIRST_SECONDS, _SECONDS = 0.02, 0.06
# updates until micro-batches are as long as possible
_GROWTH = 400
_FIRST_ROWS, _LEAST_ROWS, _MOST_ROWS = 256, 32, 4096


class MicroBatchSize:
    """The number of rows that takes between 20 and 60 ms."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.rows = _FIRST_ROWS
        self._clock = clock

    @contextmanager
    def adapt(self, updates: int) -> Generator[None]:
        """Measure the body, which trains on one micro-batch, and adapt the size of the next one.

        `updates` are those behind the drafter.
        """
        began = self._clock()
        limit = _FIRST_SECONDS + (_SECONDS - _FIRST_SECONDS) * min(1.0, updates / _GROWTH)
        try:
            yield
        except Exception:
            # Long micro-batches that are interrupted each time would never be finished.
            self._resize(min(self.rows, self._fitting_rows(began, limit)))
            raise
        self._resize(0.5 * (self.rows + self._fitting_rows(began, limit)))

    def _fitting_rows(self, began: float, limit: float) -> float:
        return self.rows * limit / max(self._clock() - began, 1e-4)

    def _resize(self, rows: float) -> None:
        self.rows = round(min(max(rows, _LEAST_ROWS), _MOST_ROWS))


def work_clock(device: torch.device) -> Callable[[], float]:
    """Return a clock of CPU time on a CPU, so that a shared core doesn't shrink micro-batches."""
    return time.thread_time if device.type == "cpu" else time.monotonic
