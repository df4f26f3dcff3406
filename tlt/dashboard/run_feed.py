"""A run as its listeners follow it: the full state once, then changes a few times a second.

The journal is read only while there are listeners. Sections are made as often as their cost allows:
it grows with the run, and the page must never take a core from the workers. Values that change with
the clock alone are sent once a second.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import structlog

from tlt.dashboard import page_sections
from tlt.dashboard.broadcast import Broadcast
from tlt.dashboard.listener_driven_feed import Feed
from tlt.dashboard.rollout_tail import RunningAnswers
from tlt.dashboard.row_deltas import RowSection, row_delta
from tlt.dashboard.run_fold import LogLine, Run
from tlt.errors import JournalError
from tlt.report.worker_lanes import LaneUpdate
from tlt.store.journal import Position

TICK_SECONDS = 0.5
_LONGEST_PAUSE = 60.0
# the longest time for which folding may block the event loop
_SLICE_SECONDS = 0.02
_CLOCK_SECONDS = 1.0
SECTIONS_SECONDS = 1.0
# making sections takes at most one part in CORE_SHARE of a core's time
CORE_SHARE = 500
_LONGEST_WAIT = 30.0
# the state of loggers is not in the journal, so sections are renewed without new entries
_RENEWAL_SECONDS = 60.0
_encode = msgspec.json.Encoder().encode
_log = structlog.get_logger("dashboard")


class RunUpdate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Changes of a run; a section that is missing has not changed."""

    # everything is included, and earlier updates are void
    full: bool = False
    # the share of the journal that has been read, until all of it has been
    reading: float | None = None
    broken: str | None = None
    head: msgspec.Raw | None = None
    lanes: LaneUpdate | None = None
    tail: msgspec.Raw | None = None
    speculation: msgspec.Raw | None = None
    learning: msgspec.Raw | None = None
    times: msgspec.Raw | None = None
    drafter: msgspec.Raw | None = None
    attempts: msgspec.Raw | None = None
    advice: msgspec.Raw | None = None
    log_lines: tuple[LogLine, ...] = ()


class RunFeed(Feed):
    def __init__(
        self,
        run: Run,
        running_answers: Callable[[], RunningAnswers | None] = lambda: None,
        followed: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(Broadcast())
        self.run = run
        self._running_answers = running_answers
        self._followed = followed
        self._broken: str | None = None
        self._forget_sent()

    def _forget_sent(self) -> None:
        self._sent: dict[str, bytes] = {}
        self._sent_rows: dict[str, RowSection] = {}
        self._next_sections = 0.0
        self._next_clock = 0.0
        self._renewal = 0.0
        # the position, and whether the run was live, when the clock's values and the sections
        # were made
        self._clock_made_at: tuple[Position, bool] | None = None
        self._sections_made_at: tuple[Position, bool] | None = None
        self._share_read = 0.0
        self._ready = False

    @property
    def followed(self) -> bool:
        return self._followed()

    def add_listener(self, wakeup: asyncio.Event) -> None:
        if not self.broadcast.listeners and self._ready and self.run.has_large_backlog:
            # what was sent is old: show the progress of reading instead
            self._ready = False
            self._share_read = self.run.share_read
            self._next_sections = self._next_clock = 0.0
            self.broadcast.invalidate()
        super().add_listener(wakeup)

    async def refresh(self) -> None:
        """Read up to now for a single request; with listeners, `_follow` does that."""
        if self.broadcast.listeners:
            return
        try:
            await self._catch_up()
        except JournalError as error:
            self._restart(str(error))
            await self._catch_up()
        # an earlier listener that returns cannot receive changes that were discarded
        if self.run.discard_pending():
            self.broadcast.invalidate()

    def full_state(self) -> bytes:
        if not self._ready:
            return _encode(RunUpdate(full=True, reading=self._share_read, broken=self._broken))
        self._publish_changes()
        rows = {name: _encode(section) for name, section in self._sent_rows.items()}
        return _encode(
            RunUpdate(
                full=True,
                broken=self._broken,
                lanes=self.run.lanes.all(),
                log_lines=tuple(self.run.log_lines),
                **_raw(self._sent | rows),
            )
        )

    async def _follow(self) -> None:
        pause = TICK_SECONDS
        while self.broadcast.listeners:
            try:
                await self._catch_up()
                self._publish_changes()
            except JournalError as error:
                # a coordinator removed entries that it had not committed, or the file is damaged
                self._restart(str(error))
            except Exception as error:  # a journal of another release may fail anywhere
                _log.exception("journal cannot be replayed")
                self._restart(f"this release cannot replay it: {error!r}")
            else:
                self._broken = None
            # reading a broken journal all the time would take a core
            pause = min(2 * pause, _LONGEST_PAUSE) if self._broken else TICK_SECONDS
            await asyncio.sleep(pause)

    async def _catch_up(self) -> None:
        begun = time.monotonic()
        while self.run.advance(_SLICE_SECONDS):
            await asyncio.sleep(0)
            if not self._ready and time.monotonic() - begun > 4 * _SLICE_SECONDS:
                begun = time.monotonic()
                self._share_read = self.run.share_read
                self.broadcast.publish(_encode(RunUpdate(reading=self._share_read)))

    def _restart(self, why: str) -> None:
        self.run.reset()
        self._forget_sent()
        self._broken = why
        self.broadcast.invalidate()

    def _publish_changes(self) -> None:
        lanes, lines = self.run.lanes.take_update(), tuple(self.run.new_log_lines)
        self.run.new_log_lines = []
        changed = self._changed()
        if not self._ready:
            self._ready = True
            self.broadcast.invalidate()
            return
        if changed or lines or lanes.changes or lanes.batches or lanes.marks:
            update = RunUpdate(lanes=lanes, log_lines=lines, **_raw(changed))
            self.broadcast.publish(_encode(update))

    def _changed(self) -> dict[str, bytes]:
        """Make what is due again, and return what has changed."""
        run, begun = self.run, time.monotonic()
        made_at = run.position, page_sections.is_live(run, self.followed)
        made: dict[str, bytes] = {}
        deltas: dict[str, bytes] = {}
        if made_at != self._clock_made_at or (made_at[1] and begun >= self._next_clock):
            self._clock_made_at = made_at
            self._next_clock = begun + _CLOCK_SECONDS
            made |= self._make_clock_values()
        if begun >= (self._next_sections if made_at != self._sections_made_at else self._renewal):
            self._sections_made_at = made_at
            deltas = self._make_sections(made)
        changed = {name: raw for name, raw in made.items() if self._sent.get(name) != raw}
        self._sent.update(changed)
        return changed | deltas

    def _make_clock_values(self) -> dict[str, bytes]:
        run, followed = self.run, self.followed
        answers = self._running_answers() if page_sections.is_live(run, followed) else None
        now = (run.began or 0.0) + page_sections.now(run, followed)
        tail = run.tail.view(run.ledger.state, now, answers)
        return {"head": _encode(page_sections.head(run, followed)), "tail": _encode(tail)}

    def _make_sections(self, made: dict[str, bytes]) -> dict[str, bytes]:
        """Add the sections to `made`; return the deltas of those that are sent row by row."""
        begun = time.thread_time()
        sections = page_sections.sections(self.run, self.followed)
        deltas: dict[str, bytes] = {}
        for name in sections.__struct_fields__:
            section = getattr(sections, name)
            lists = page_sections.ROW_LISTS.get(name)
            if lists is None:
                made[name] = _encode(section)
            elif (delta := row_delta(self._sent_rows.get(name), section, lists)) is not None:
                self._sent_rows[name] = section
                deltas[name] = _encode(delta)
        self._renewal = time.monotonic() + _RENEWAL_SECONDS
        wait = min(_LONGEST_WAIT, (time.thread_time() - begun) * CORE_SHARE)
        self._next_sections = time.monotonic() + max(SECTIONS_SECONDS, wait)
        return deltas


def _raw(encoded: Mapping[str, bytes]) -> dict[str, Any]:
    return {name: msgspec.Raw(raw) for name, raw in encoded.items()}
