"""What grows by a row a step: rows that have not changed are told once."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import msgspec

from tlt.ids import Step


class _Row(Protocol):
    @property
    def step(self) -> Step: ...


class Growing(msgspec.Struct, frozen=True, kw_only=True):
    # rows of earlier steps are as they were; None: these are all
    since: Step | None = None


_Growing = TypeVar("_Growing", bound=Growing)


def news(before: _Growing | None, now: _Growing, lists: Sequence[str]) -> _Growing | None:
    """With the rows alone that are not as `before`; None where nothing is new."""
    if before is None:
        return now
    changed = [_first_change(getattr(before, name), getattr(now, name)) for name in lists]
    steps = [step for step in changed if step is not None]
    empty: dict[str, object] = dict.fromkeys(lists, ())
    if not steps and _without(before, empty) == _without(now, empty):
        return None
    since = min(steps, default=_after_all(now, lists))
    rows = {name: tuple(row for row in getattr(now, name) if row.step >= since) for name in lists}
    return msgspec.structs.replace(now, since=since, **rows)


def _first_change(before: Sequence[_Row], now: Sequence[_Row]) -> Step | None:
    """Of rows of which the oldest may be gone."""
    gone = next((n for n, row in enumerate(before) if now and row.step >= now[0].step), len(before))
    for old, new in zip(before[gone:], now, strict=False):
        if old is not new and old != new:
            return min(old.step, new.step)
    kept = len(before) - gone
    return now[kept].step if len(now) > kept else None


def _without(section: _Growing, empty: dict[str, object]) -> _Growing:
    return msgspec.structs.replace(section, **empty)


def _after_all(section: Growing, lists: Sequence[str]) -> Step:
    last = [rows[-1].step for name in lists if (rows := getattr(section, name))]
    return Step(max(last, default=-1) + 1)
