"""Origins of each token of a row: policy version, batch size, drafter, and how it was made.

What holds for a whole step is recorded once for all rows; a row knows which steps gave it several
tokens.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from tlt.base.id_types import DrafterVersion, PolicyVersion
from tlt.engine.native.running_batch_tensors import Row
from tlt.protocol.refs import BatchSpan, DrafterSpan, OriginSpan, PolicySpan

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


class TokenOrigins:
    def __init__(self) -> None:
        self._versions = RunLengthSeries[PolicyVersion]()
        self._sizes = RunLengthSeries[int]()
        # true if anything was proposed, and the drafter that proposed it
        self._proposals = RunLengthSeries[tuple[bool, DrafterVersion | None]]()

    def record(
        self,
        step: int,
        version: PolicyVersion,
        size: int,
        proposed: bool,
        drafter: DrafterVersion | None,
    ) -> None:
        self._versions.record(step, version)
        self._sizes.record(step, size)
        self._proposals.record(step, (proposed, drafter))

    def forget(self, before: int) -> None:
        """Drop what no row that began at this step or later needs."""
        for series in (self._versions, self._sizes, self._proposals):
            series.forget(before)

    def policies(self, row: Row, end: int) -> tuple[PolicySpan, ...]:
        spans = _tokens(self._versions, row, end)
        return tuple(PolicySpan(version=v, tokens=n) for v, n in spans)

    def batches(self, row: Row, end: int) -> tuple[BatchSpan, ...]:
        return tuple(BatchSpan(size=s, tokens=n) for s, n in _tokens(self._sizes, row, end))

    def drafters(self, row: Row, end: int) -> tuple[DrafterSpan, ...]:
        spans = _tokens(self._proposals, row, end)
        runs = _merged((drafter, n) for (_, drafter), n in spans)
        return tuple(DrafterSpan(version=v, tokens=n) for v, n in runs)

    def origins(self, row: Row, end: int) -> tuple[OriginSpan, ...]:
        runs = _merged(self._origins(row, end))
        return tuple(OriginSpan(origin=origin, tokens=n) for origin, n in runs)

    def _origins(self, row: Row, end: int) -> Iterator[tuple[str, int]]:
        accepted, step = dict(row.accepted_by_step), row.first_step
        for (proposed, _), steps in self._proposals.spans(row.first_step, end):
            if not proposed:
                yield "plain", steps
            else:
                for at in range(step, step + steps):
                    if at in accepted:
                        yield "accepted", accepted[at]
                    last = at == end - 1 and row.ends_on_draft
                    yield ("accepted" if last else "corrected"), 1
            step += steps


def _tokens(series: RunLengthSeries[T], row: Row, end: int) -> Iterator[tuple[T, int]]:
    """Convert the spans of a series from steps to the row's tokens."""
    accepted, used, step = row.accepted_by_step, 0, row.first_step
    for value, steps in series.spans(row.first_step, end):
        step += steps
        tokens = steps
        while used < len(accepted) and accepted[used][0] < step:
            tokens += accepted[used][1]
            used += 1
        yield value, tokens


def _merged(runs: Iterable[tuple[T, int]]) -> list[tuple[T, int]]:
    merged: list[tuple[T, int]] = []
    for value, tokens in runs:
        if merged and merged[-1][0] == value:
            merged[-1] = value, merged[-1][1] + tokens
        else:
            merged.append((value, tokens))
    return merged
