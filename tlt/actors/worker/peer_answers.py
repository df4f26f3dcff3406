"""Follow the answers of other workers, which this worker's ranks use for proposals and training.

A missed answer costs no more than a proposal, so only new events are read, without a group, and
nothing is acknowledged. After each read a worker pauses, the longer the more workers there are:
otherwise each event would wake them all, and Redis's work for it would grow with their number.
"""

import asyncio
from collections.abc import AsyncGenerator

from tlt.errors import StoreError
from tlt.protocol.events import AnyEvent, RolloutFinished, WorkerIdled
from tlt.store.message_codec import Fields
from tlt.store.redis_connection import CONNECTION_ERRORS
from tlt.store.redis_stream import Stream, reply_entries

_BLOCK_MS = 1000
# of one read; older ones are left out
_MOST_EVENTS = 64
# of all workers
READS_A_SECOND = 500.0
_RETRY_SECONDS = 0.1


async def follow_peers(
    events: Stream[AnyEvent], workers: int
) -> AsyncGenerator[RolloutFinished | WorkerIdled]:
    """Yield new events about answers and idle workers; `workers` follow them."""
    after = "$"
    while True:
        page = await read_newest(events, after)
        for _, fields in page:
            try:
                event = events.codec.decode(fields)
            except StoreError:
                continue  # the coordinator moves it to the dead letters
            if isinstance(event, RolloutFinished | WorkerIdled):
                yield event
        if page:
            after = page[-1][0].decode()
            await asyncio.sleep(workers / READS_A_SECOND)


async def read_newest(events: Stream[AnyEvent], after: str) -> list[tuple[bytes, Fields]]:
    """Wait for entries after an id, and return the newest ones; none if there are none for long."""
    connection, key = events.connection, events.key
    try:
        reply = await connection.xread({key: after}, count=_MOST_EVENTS, block=_BLOCK_MS)
        page = reply_entries(reply)
        if len(page) == _MOST_EVENTS:
            page = (await connection.xrevrange(key, count=_MOST_EVENTS))[::-1]
    except CONNECTION_ERRORS:
        await asyncio.sleep(_RETRY_SECONDS)
        return []
    return page
