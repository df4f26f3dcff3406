"""Server-sent events: what a listener missed, then what comes, and a beat when nothing does.

An event's id names the channels that told it and how far each had come: who comes back with it is
told the rest, or the whole where too much has passed or another channel answers.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

from tlt.dashboard.broadcast import Channel

_BEAT_SECONDS = 5.0
# no number of ours has so many
_DIGITS = 16
_RETRY = b"retry: 1000\n\n"


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
                    yield _event(name, whole, _id(feeds, reached))
                    continue
                for count, message in enumerate(missed, feed.channel.number - len(missed) + 1):
                    reached[name] = count
                    yield _event(name, message, _id(feeds, reached))
            try:
                await asyncio.wait_for(bell.wait(), _BEAT_SECONDS)
            except TimeoutError:
                yield b"event: beat\ndata: \n\n"
    finally:
        for feed in feeds.values():
            feed.leave(bell)


def _event(name: str, data: bytes, id_: str) -> bytes:
    """JSON has no line ends of its own, so that one line of data is all of it."""
    return b"event: %s\nid: %s\ndata: %s\n\n" % (name.encode(), id_.encode(), data)


def _id(feeds: Mapping[str, Feed], reached: Mapping[str, int]) -> str:
    return ".".join(f"{feeds[name].channel.name}-{number}" for name, number in reached.items())


def _reached(feeds: Mapping[str, Feed], last_id: str | None) -> dict[str, int]:
    names = {feed.channel.name: name for name, feed in feeds.items()}
    found: dict[str, int] = {}
    for part in (last_id or "").split("."):
        channel, _, number = part.partition("-")
        if channel in names and number.isdecimal() and len(number) < _DIGITS:
            found[names[channel]] = int(number)
    return found
