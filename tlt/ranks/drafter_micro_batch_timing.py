"""Fit micro-batches to a time limit, because a stop drops the one in progress."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

_SECONDS = 0.06
_FIRST_ROWS, _LEAST_ROWS, _MOST_ROWS = 256, 32, 4096


class MicroBatchSize:
    """The number of rows that takes about 60 ms."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.rows = _FIRST_ROWS
        self._clock = clock

    @contextmanager
    def adapt(self) -> Generator[None]:
        """Measure the body, which trains on one micro-batch, and adapt the size of the next one."""
        began = self._clock()
        try:
            yield
        except Exception:
            # Long micro-batches that are interrupted each time would never be finished.
            self._resize(min(self.rows, self._fitting_rows(began)))
            raise
        self._resize(0.5 * (self.rows + self._fitting_rows(began)))

    def _fitting_rows(self, began: float) -> float:
        return self.rows * _SECONDS / max(self._clock() - began, 1e-4)

    def _resize(self, rows: float) -> None:
        self.rows = round(min(max(rows, _LEAST_ROWS), _MOST_ROWS))


def work_clock(device: torch.device) -> Callable[[], float]:
    """Return a clock of CPU time on a CPU, so that a shared core doesn't shrink micro-batches."""
    return time.thread_time if device.type == "cpu" else time.monotonic
