"""Sections with one row a step are sent as deltas: an unchanged row is sent once."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import msgspec

from tlt.base.id_types import Step


class _Row(Protocol):
    @property
    def step(self) -> Step: ...


class RowSection(msgspec.Struct, frozen=True, kw_only=True):
    # the first step whose rows are included; earlier rows are unchanged. None: all rows are
    since: Step | None = None


_Section = TypeVar("_Section", bound=RowSection)


def row_delta(before: _Section | None, now: _Section, lists: Sequence[str]) -> _Section | None:
    """Return `now` with only the changed rows of `lists`, or None if nothing has changed."""
    if before is None:
        return now
    changed = [_first_change(getattr(before, name), getattr(now, name)) for name in lists]
    steps = [step for step in changed if step is not None]
    empty: dict[str, object] = dict.fromkeys(lists, ())
    if not steps and _replace(before, empty) == _replace(now, empty):
        return None
    since = min(steps, default=_after_all(now, lists))
    rows = {name: tuple(row for row in getattr(now, name) if row.step >= since) for name in lists}
    return msgspec.structs.replace(now, since=since, **rows)


def _first_change(before: Sequence[_Row], now: Sequence[_Row]) -> Step | None:
    """Return the first step whose row has changed; the oldest rows may have been dropped."""
    dropped = next(
        (n for n, row in enumerate(before) if now and row.step >= now[0].step), len(before)
    )
    for old, new in zip(before[dropped:], now, strict=False):
        if old is not new and old != new:
            return min(old.step, new.step)
    kept = len(before) - dropped
    return now[kept].step if len(now) > kept else None


def _replace(section: _Section, changes: dict[str, object]) -> _Section:
    return msgspec.structs.replace(section, **changes)


def _after_all(section: RowSection, lists: Sequence[str]) -> Step:
    last = [rows[-1].step for name in lists if (rows := getattr(section, name))]
    return Step(max(last, default=-1) + 1)
