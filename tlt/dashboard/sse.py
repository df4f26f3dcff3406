"""Server-sent events: first what a listener missed, then each change, and a heartbeat in between.

An event's id names the broadcasts that it comes from and the number that each had reached. A
listener that returns with an id receives the rest, or the full state where the history is too short
or the id is of other broadcasts.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping

from tlt.dashboard.listener_driven_feed import Feed

_HEARTBEAT_SECONDS = 5.0
# more digits than any number of ours has
_MAX_DIGITS = 16
_RETRY = b"retry: 1000\n\n"


async def events(feeds: Mapping[str, Feed], last_id: str | None) -> AsyncGenerator[bytes]:
    """Yield events until the listener has left."""
    wakeup = asyncio.Event()
    reached = _parse_id(feeds, last_id)
    for feed in feeds.values():
        feed.add_listener(wakeup)
    try:
        yield _RETRY
        while True:
            wakeup.clear()
            for name, feed in feeds.items():
                known = reached.get(name)
                missed = None if known is None else feed.broadcast.after(known)
                if missed is None:
                    # making the full state may publish pending changes: read the number after it
                    missed = [feed.full_state()]
                for count, message in enumerate(missed, feed.broadcast.number - len(missed) + 1):
                    reached[name] = count
                    yield _event(name, message, _format_id(feeds, reached))
            try:
                await asyncio.wait_for(wakeup.wait(), _HEARTBEAT_SECONDS)
            except TimeoutError:
                yield b"event: heartbeat\ndata: \n\n"
    finally:
        for feed in feeds.values():
            feed.remove_listener(wakeup)


def _event(name: str, data: bytes, id_: str) -> bytes:
    """Return an event of one data line: our JSON has no line breaks."""
    return b"event: %s\nid: %s\ndata: %s\n\n" % (name.encode(), id_.encode(), data)


def _format_id(feeds: Mapping[str, Feed], reached: Mapping[str, int]) -> str:
    return ".".join(f"{feeds[name].broadcast.name}-{number}" for name, number in reached.items())


def _parse_id(feeds: Mapping[str, Feed], last_id: str | None) -> dict[str, int]:
    names = {feed.broadcast.name: name for name, feed in feeds.items()}
    reached: dict[str, int] = {}
    for part in (last_id or "").split("."):
        broadcast, _, number = part.partition("-")
        if broadcast in names and number.isdecimal() and len(number) < _MAX_DIGITS:
            reached[names[broadcast]] = int(number)
    return reached
