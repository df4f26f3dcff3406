"""One value per decode step, run-length encoded; any range of steps can be read as spans."""

from bisect import bisect_right
from typing import Generic, TypeVar

T = TypeVar("T")


class RunLengthSeries(Generic[T]):
    def __init__(self) -> None:
        self._starts: list[int] = []
        self._values: list[T] = []

    def record(self, step: int, value: T) -> None:
        """Set the value from this step on."""
        if not self._values or self._values[-1] != value:
            self._starts.append(step)
            self._values.append(value)

    def spans(self, start: int, end: int) -> list[tuple[T, int]]:
        """Return (value, steps) for the steps from `start` up to, but not including, `end`."""
        spans: list[tuple[T, int]] = []
        index = bisect_right(self._starts, start) - 1
        while start < end:
            following = self._starts[index + 1 : index + 2]
            until = min([end, *following])
            spans.append((self._values[index], until - start))
            start, index = until, index + 1
        return spans

    def forget(self, before: int) -> None:
        """Drop what no span that starts at `before` or later needs."""
        past = max(bisect_right(self._starts, before) - 1, 0)
        del self._starts[:past], self._values[:past]
