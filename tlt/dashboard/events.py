"""Server-sent events: what a listener missed, then what comes, and a beat when nothing does.

An event's id names the process that told it and how far each feed had come: who comes back with it
is told the rest, or the whole where too much has passed or another process answers.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

from tlt.dashboard.channel import Channel

_BEAT_SECONDS = 5.0
_RETRY = b"retry: 1000\n\n"
BOOT = secrets.token_hex(4)


class Feed(Protocol):
    """A run's or the session's."""

    channel: Channel

    def listen(self, bell: asyncio.Event) -> None: ...

    def leave(self, bell: asyncio.Event) -> None: ...

    def whole(self) -> bytes: ...


async def events(feeds: Mapping[str, Feed], last_id: str | None) -> AsyncGenerator[bytes]:
    """Until whoever listens is gone."""
    bell = asyncio.Event()
    reached = _reached(feeds, last_id)
    for feed in feeds.values():
        feed.listen(bell)
    try:
        yield _RETRY
        while True:
            bell.clear()
            for name, feed in feeds.items():
                known = reached.get(name)
                missed = None if known is None else feed.channel.since(known)
                if missed is None:
                    # what nobody was told yet is told first, and then counted
                    whole = feed.whole()
                    reached[name] = feed.channel.number
                    yield _event(name, whole, reached)
                    continue
                for count, message in enumerate(missed, feed.channel.number - len(missed) + 1):
                    reached[name] = count
                    yield _event(name, message, reached)
            try:
                await asyncio.wait_for(bell.wait(), _BEAT_SECONDS)
            except TimeoutError:
                yield b"event: beat\ndata: \n\n"
    finally:
        for feed in feeds.values():
            feed.leave(bell)


def _event(name: str, data: bytes, reached: Mapping[str, int]) -> bytes:
    """JSON has no line ends of its own, so that one line of data is all of it."""
    id_ = ".".join((BOOT, *(f"{feed}-{number}" for feed, number in reached.items())))
    return b"event: %s\nid: %s\ndata: %s\n\n" % (name.encode(), id_.encode(), data)


def _reached(feeds: Mapping[str, Feed], last_id: str | None) -> dict[str, int]:
    boot, *numbers = (last_id or "").split(".")
    if boot != BOOT:
        return {}
    found: dict[str, int] = {}
    for part in numbers:
        name, _, number = part.rpartition("-")
        if name in feeds and number.isdecimal():
            found[name] = int(number)
    return found
