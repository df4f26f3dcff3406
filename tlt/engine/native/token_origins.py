"""Where each token of a row came from, told in runs of tokens of the same kind.

What holds for a whole step is recorded once for all rows; a row adds which steps gave it several.
"""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from tlt.engine.native.run_length_series import RunLengthSeries
from tlt.engine.native.running_batch import Row
from tlt.ids import DrafterVersion, PolicyVersion
from tlt.protocol.refs import BatchSpan, DrafterSpan, OriginSpan, PolicySpan

T = TypeVar("T")


class TokenOrigins:
    def __init__(self) -> None:
        self._versions = RunLengthSeries[PolicyVersion]()
        self._sizes = RunLengthSeries[int]()
        # whether anything was guessed, and by which drafter
        self._guesses = RunLengthSeries[tuple[bool, DrafterVersion | None]]()

    def record(
        self,
        step: int,
        version: PolicyVersion,
        size: int,
        guessed: bool,
        drafter: DrafterVersion | None,
    ) -> None:
        self._versions.record(step, version)
        self._sizes.record(step, size)
        self._guesses.record(step, (guessed, drafter))

    def forget(self, before: int) -> None:
        """No row that is asked for began before this step."""
        for timeline in (self._versions, self._sizes, self._guesses):
            timeline.forget(before)

    def policies(self, row: Row, end: int) -> tuple[PolicySpan, ...]:
        spans = _tokens(self._versions, row, end)
        return tuple(PolicySpan(version=v, tokens=n) for v, n in spans)

    def batches(self, row: Row, end: int) -> tuple[BatchSpan, ...]:
        return tuple(BatchSpan(size=s, tokens=n) for s, n in _tokens(self._sizes, row, end))

    def drafters(self, row: Row, end: int) -> tuple[DrafterSpan, ...]:
        spans = _tokens(self._guesses, row, end)
        runs = _merged((drafter, n) for (_, drafter), n in spans)
        return tuple(DrafterSpan(version=v, tokens=n) for v, n in runs)

    def origins(self, row: Row, end: int) -> tuple[OriginSpan, ...]:
        runs = _merged(self._origins(row, end))
        return tuple(OriginSpan(origin=origin, tokens=n) for origin, n in runs)

    def _origins(self, row: Row, end: int) -> Iterator[tuple[str, int]]:
        gains, step = dict(row.gains), row.first_step
        for (guessed, _), steps in self._guesses.spans(row.first_step, end):
            if not guessed:
                yield "plain", steps
            else:
                for at in range(step, step + steps):
                    if at in gains:
                        yield "accepted", gains[at]
                    last = at == end - 1 and row.ends_on_draft
                    yield ("accepted" if last else "corrected"), 1
            step += steps


def _tokens(timeline: RunLengthSeries[T], row: Row, end: int) -> Iterator[tuple[T, int]]:
    """Each stretch of steps, in tokens."""
    gains, taken, step = row.gains, 0, row.first_step
    for value, steps in timeline.spans(row.first_step, end):
        step += steps
        tokens = steps
        while taken < len(gains) and gains[taken][0] < step:
            tokens += gains[taken][1]
            taken += 1
        yield value, tokens


def _merged(runs: Iterable[tuple[T, int]]) -> list[tuple[T, int]]:
    merged: list[tuple[T, int]] = []
    for value, tokens in runs:
        if merged and merged[-1][0] == value:
            merged[-1] = value, merged[-1][1] + tokens
        else:
            merged.append((value, tokens))
    return merged
