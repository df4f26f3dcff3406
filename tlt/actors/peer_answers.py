"""Follow the answers of other workers, which this worker's ranks use for proposals and training.

A missed answer costs no more than a proposal, so only new events are read, without a group, and
nothing is acknowledged. The stream is read at intervals: a blocking read would wake every worker
for each event of any other, and Redis's work for an event would grow with the number of workers.
"""

import asyncio
from collections.abc import AsyncGenerator

from tlt.errors import StoreError
from tlt.protocol.events import AnyEvent, RolloutFinished, WorkerIdled
from tlt.store.message_codec import Fields
from tlt.store.redis_connection import CONNECTION_ERRORS, retry_until_connected
from tlt.store.redis_stream import Stream

READ_SECONDS = 0.5
# of one read; older ones are left out
_MOST_EVENTS = 64


async def follow_peers(
    events: Stream[AnyEvent], every_seconds: float = READ_SECONDS
) -> AsyncGenerator[RolloutFinished | WorkerIdled]:
    """Yield the session's new events about answers and idle workers."""
    after = await retry_until_connected(lambda: _newest_id(events))
    while True:
        await asyncio.sleep(every_seconds)
        newest = await read_newest(events, after)
        if newest:
            after = newest[0][0]
        for _, fields in reversed(newest):
            try:
                event = events.codec.decode(fields)
            except StoreError:
                continue  # the coordinator moves it to the dead letters
            if isinstance(event, RolloutFinished | WorkerIdled):
                yield event


async def read_newest(events: Stream[AnyEvent], after: bytes) -> list[tuple[bytes, Fields]]:
    """Return the newest entries after an id, the newest first; none if Redis can't be reached."""
    try:
        return await events.connection.xrevrange(events.key, min=b"(" + after, count=_MOST_EVENTS)
    except CONNECTION_ERRORS:
        return []


async def _newest_id(events: Stream[AnyEvent]) -> bytes:
    newest = await events.connection.xrevrange(events.key, count=1)
    return newest[0][0] if newest else b"0-0"
