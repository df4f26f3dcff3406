"""A run as listeners follow it: the whole once, then what has changed, a few times a second.

The journal is read only while somebody listens. Sections are made as often as one thread can
afford: their cost grows with the run, and the page may never take a core from the workers. What
moves with the clock alone is told once a second.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from tlt.dashboard import page_sections
from tlt.dashboard.broadcast import Channel
from tlt.dashboard.on_demand_task import Follower
from tlt.dashboard.rollout_tail import Holding
from tlt.dashboard.row_deltas import Growing, news
from tlt.dashboard.run_fold import Line, Run
from tlt.errors import JournalError
from tlt.report.worker_lanes import LaneNews
from tlt.store.journal import Position

_TICK_SECONDS = 0.5
_LONGEST_PAUSE = 60.0
# of folding without letting anybody else have a turn
_SLICE_SECONDS = 0.02
_CLOCK_SECONDS = 1.0
_SECTIONS_SECONDS = 1.0
# sections may take one part in so many of a core's time
_SHARE = 500
_LONGEST_WAIT = 30.0
# what is told of loggers is in no journal
_RENEWAL_SECONDS = 60.0
_encode = msgspec.json.Encoder().encode
_log = structlog.get_logger("dashboard")


class Update(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A section that is not there has not changed; `whole`: what was told before is void."""

    whole: bool = False
    # until the journal has been read up to now: the share that was
    reading: float | None = None
    broken: str | None = None
    head: msgspec.Raw | None = None
    lanes: LaneNews | None = None
    tail: msgspec.Raw | None = None
    speculation: msgspec.Raw | None = None
    learning: msgspec.Raw | None = None
    times: msgspec.Raw | None = None
    drafter: msgspec.Raw | None = None
    attempts: msgspec.Raw | None = None
    advice: msgspec.Raw | None = None
    lines: tuple[Line, ...] = ()


class RunFeed(Follower):
    def __init__(
        self, run: Run, holding: Callable[[], Holding | None], followed: Callable[[], bool]
    ) -> None:
        self.run = run
        super().__init__(Channel())
        self._holding = holding
        self._followed = followed
        self._said: dict[str, bytes] = {}
        # the sections that are told row by row
        self._grown: dict[str, Growing] = {}
        self._next_sections = 0.0
        self._next_clock = 0.0
        self._renewal = 0.0
        # how far the run had come when head, tail and sections were made, and whether it went on
        self._shown: tuple[Position, bool] | None = None
        self._sections_of: tuple[Position, bool] | None = None
        self._reading = 0.0
        self._ready = False
        self._broken: str | None = None

    @property
    def followed(self) -> bool:
        return self._followed()

    def listen(self, bell: asyncio.Event) -> None:
        """Who comes after nobody listened for long is not told what was then."""
        if not self.channel.listeners and self._ready and (share := self.run.reading) is not None:
            self._ready = False
            self._reading = share
            self._next_sections = self._next_clock = 0.0
            self.channel.forget()
        super().listen(bell)

    async def refresh(self) -> None:
        """For who asks once and does not listen."""
        if self.channel.listeners:
            return
        try:
            await self._catch_up()
        except JournalError as error:
            self._begin_again(str(error))
            await self._catch_up()
        # who listened before is not told bit by bit what nobody has kept
        if self.run.forget_news():
            self.channel.forget()

    def whole(self) -> bytes:
        """All that a new listener has to know."""
        if not self._ready:
            return _encode(Update(whole=True, reading=self._reading, broken=self._broken))
        self._tell()
        return _encode(
            Update(
                whole=True,
                broken=self._broken,
                lanes=self.run.lanes.all(),
                lines=tuple(self.run.lines),
                **self._raw(self._said),
                **self._raw({name: _encode(section) for name, section in self._grown.items()}),
            )
        )

    async def _follow(self) -> None:
        pause = _TICK_SECONDS
        while self.channel.listeners:
            try:
                await self._catch_up()
                self._tell()
            except JournalError as error:
                # The coordinator took back what it had not committed, or the file is damaged.
                self._begin_again(str(error))
            except Exception as error:  # what another release wrote may fail anywhere
                _log.exception("journal cannot be replayed")
                self._begin_again(f"this release cannot replay it: {error!r}")
            else:
                self._broken = None
            # reading a journal again and again that stays broken would take a core
            pause = min(2 * pause, _LONGEST_PAUSE) if self._broken else _TICK_SECONDS
            await asyncio.sleep(pause)

    async def _catch_up(self) -> None:
        begun = time.monotonic()
        while self.run.advance(_SLICE_SECONDS):
            await asyncio.sleep(0)
            if not self._ready and time.monotonic() - begun > 4 * _SLICE_SECONDS:
                begun = time.monotonic()
                self._reading = self.run.share_read
                self.channel.publish(_encode(Update(reading=self._reading)))

    def _begin_again(self, why: str) -> None:
        self.run.begin()
        self._said.clear()
        self._grown.clear()
        self._ready = False
        self._reading = 0.0
        self._next_sections = self._next_clock = 0.0
        self._shown = self._sections_of = None
        self._broken = why
        self.channel.forget()

    def _tell(self) -> None:
        lanes, lines = self.run.lanes.news(), tuple(self.run.new_lines)
        self.run.new_lines = []
        changed = self._changed()
        if not self._ready:
            self._ready = True
            self.channel.forget()
            return
        if changed or lines or lanes.changes or lanes.batches or lanes.marks:
            self.channel.publish(_encode(Update(lanes=lanes, lines=lines, **self._raw(changed))))

    def _changed(self) -> dict[str, bytes]:
        run, begun = self.run, time.monotonic()
        shown = run.position, page_sections.is_live(run, self.followed)
        made: dict[str, bytes] = {}
        grown: dict[str, bytes] = {}
        if shown != self._shown or (shown[1] and begun >= self._next_clock):
            self._shown = shown
            self._next_clock = begun + _CLOCK_SECONDS
            made |= self._made_by_the_clock()
        if begun >= (self._next_sections if shown != self._sections_of else self._renewal):
            self._sections_of = shown
            grown = self._make_sections(made)
        changed = {name: raw for name, raw in made.items() if self._said.get(name) != raw}
        self._said.update(changed)
        return changed | grown

    def _made_by_the_clock(self) -> dict[str, bytes]:
        run, followed = self.run, self.followed
        holding = self._holding() if page_sections.is_live(run, followed) else None
        now = (run.began or 0.0) + page_sections.now(run, followed)
        tail = run.tail.view(run.ledger.state, now, holding)
        return {"head": _encode(page_sections.head(run, followed)), "tail": _encode(tail)}

    def _make_sections(self, made: dict[str, bytes]) -> dict[str, bytes]:
        """Returns the news of those that are told row by row."""
        begun = time.thread_time()
        sections = page_sections.sections(self.run, self.followed)
        grown: dict[str, bytes] = {}
        for name in sections.__struct_fields__:
            section = getattr(sections, name)
            if name not in page_sections.GROWING:
                made[name] = _encode(section)
            elif (
                new := news(self._grown.get(name), section, page_sections.GROWING[name])
            ) is not None:
                self._grown[name] = section
                grown[name] = _encode(new)
        self._renewal = time.monotonic() + _RENEWAL_SECONDS
        wait = min(_LONGEST_WAIT, (time.thread_time() - begun) * _SHARE)
        self._next_sections = time.monotonic() + max(_SECTIONS_SECONDS, wait)
        return grown

    @staticmethod
    def _raw(said: dict[str, bytes]) -> dict[str, Any]:
        return {name: msgspec.Raw(raw) for name, raw in said.items()}
