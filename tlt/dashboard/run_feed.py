"""A run as listeners follow it: the whole once, then what has changed, a few times a second.

The journal is read only while somebody listens. Sections are made as often as one thread can
afford: their cost grows with the run, and the page may never take a core from the workers.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from tlt.dashboard import views
from tlt.dashboard.channel import Channel
from tlt.dashboard.follower import Follower
from tlt.dashboard.run import Line, Run
from tlt.dashboard.tail import Holding
from tlt.errors import JournalError
from tlt.policies.ledger.lanes import LaneNews

_TICK_SECONDS = 0.3
_LONGEST_PAUSE = 60.0
# of folding without letting anybody else have a turn
_SLICE_SECONDS = 0.02
_SECTIONS_SECONDS = 1.0
# sections may take one part in so many of the time
_SHARE = 40
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
    def __init__(self, run: Run, holding: Callable[[], Holding], followed: bool) -> None:
        self.run = run
        super().__init__(Channel())
        self._holding = holding
        self._followed = followed
        self._said: dict[str, bytes] = {}
        self._next_sections = 0.0
        self._reading = 0.0
        self._ready = False
        self._broken: str | None = None

    async def refresh(self) -> None:
        """For who asks once and does not listen."""
        if not self.channel.listeners:
            await self._catch_up()

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
            )
        )

    async def _follow(self) -> None:
        pause = _TICK_SECONDS
        while self.channel.listeners:
            try:
                await self._catch_up()
            except JournalError as error:
                # The coordinator took back what it had not committed, or the file is damaged.
                self._begin_again(str(error))
            except Exception as error:  # what another release wrote may fail anywhere
                _log.exception("journal cannot be replayed")
                self._begin_again(f"this release cannot replay it: {error!r}")
            else:
                self._broken = None
                self._tell()
            # reading a journal again and again that stays broken would take a core
            pause = min(2 * pause, _LONGEST_PAUSE) if self._broken else _TICK_SECONDS
            await asyncio.sleep(pause)

    async def _catch_up(self) -> None:
        begun = time.monotonic()
        while self.run.advance(_SLICE_SECONDS):
            await asyncio.sleep(0)
            if not self._ready and time.monotonic() - begun > 4 * _SLICE_SECONDS:
                begun = time.monotonic()
                read = self.run.position.bytes
                self._reading = read / max(1, read + self.run.unread)
                self.channel.publish(_encode(Update(reading=self._reading)))

    def _begin_again(self, why: str) -> None:
        self.run.begin()
        self._said.clear()
        self._ready = False
        self._reading = 0.0
        self._next_sections = 0.0
        self._broken = why
        self.channel.forget()

    def _tell(self) -> None:
        news, lines = self.run.lanes.news(), tuple(self.run.new_lines)
        self.run.new_lines = []
        changed = self._changed()
        if not self._ready:
            self._ready = True
            self.channel.forget()
            return
        if changed or lines or news.changes or news.batches or news.marks:
            self.channel.publish(_encode(Update(lanes=news, lines=lines, **self._raw(changed))))

    def _changed(self) -> dict[str, bytes]:
        run = self.run
        now = time.time() if self._followed and not run.ended else run.heard
        tail = run.tail.view(run.ledger.state, now, self._holding())
        made = {"head": _encode(views.head(run)), "tail": _encode(tail)}
        begun = time.monotonic()
        if begun >= self._next_sections:
            sections = views.sections(run, self._followed)
            for name in sections.__struct_fields__:
                made[name] = _encode(getattr(sections, name))
            spent = time.monotonic() - begun
            self._next_sections = begun + max(_SECTIONS_SECONDS, spent * _SHARE)
        changed = {name: raw for name, raw in made.items() if self._said.get(name) != raw}
        self._said.update(changed)
        return changed

    @staticmethod
    def _raw(said: dict[str, bytes]) -> dict[str, Any]:
        return {name: msgspec.Raw(raw) for name, raw in said.items()}
