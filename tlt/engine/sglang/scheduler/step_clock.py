"""Measure what a step took: by the device's events on a GPU, by CPU time on a CPU."""

from time import perf_counter, thread_time
from typing import Any, NamedTuple

import torch


class Mark(NamedTuple):
    wall: float
    # CPU seconds, or an event of the device
    work: Any


class StepClock:
    def __init__(self, device: torch.device) -> None:
        self._on_cpu = device.type == "cpu"

    def mark(self) -> Mark:
        """Return this moment; on a GPU the device reaches it later."""
        if self._on_cpu:
            return Mark(perf_counter(), thread_time())
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return Mark(perf_counter(), event)

    def work_seconds(self, first: Mark, last: Mark) -> float:
        """Return the seconds of work between two marks that the device has passed."""
        if self._on_cpu:
            return last.work - first.work
        return first.work.elapsed_time(last.work) / 1000.0
