"""One value per decode step, run-length encoded: any stretch of steps can be told in spans."""

from bisect import bisect_right
from typing import Generic, TypeVar

T = TypeVar("T")


class RunLengthSeries(Generic[T]):
    def __init__(self) -> None:
        self._starts: list[int] = []
        self._values: list[T] = []

    def record(self, step: int, value: T) -> None:
        """From this step on it is `value`."""
        if not self._values or self._values[-1] != value:
            self._starts.append(step)
            self._values.append(value)

    def spans(self, start: int, end: int) -> list[tuple[T, int]]:
        """(value, steps) over steps start to end, the latter excluded."""
        spans: list[tuple[T, int]] = []
        index = bisect_right(self._starts, start) - 1
        while start < end:
            following = self._starts[index + 1 : index + 2]
            until = min([end, *following])
            spans.append((self._values[index], until - start))
            start, index = until, index + 1
        return spans

    def forget(self, before: int) -> None:
        """Spans will start at `before` or later."""
        past = max(bisect_right(self._starts, before) - 1, 0)
        del self._starts[:past], self._values[:past]
