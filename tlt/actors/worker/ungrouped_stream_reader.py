"""Read a Redis stream without a group: every reader gets all entries and acknowledges none."""

import asyncio
from collections.abc import AsyncGenerator

from tlt.store.message_codec import Fields
from tlt.store.redis_connection import CONNECTION_ERRORS, Connection
from tlt.store.redis_stream import reply_entries

_RETRY_SECONDS = 0.1


async def read_pages(
    connection: Connection, key: str, *, after: str, count: int, block_ms: int
) -> AsyncGenerator[list[tuple[str, Fields]]]:
    """Yield a stream's entries after an id, page by page; a page is empty if none come in time."""
    while True:
        try:
            reply = await connection.xread({key: after}, count=count, block=block_ms)
        except CONNECTION_ERRORS:
            await asyncio.sleep(_RETRY_SECONDS)
            reply = None
        page = [(id_.decode(), fields) for id_, fields in reply_entries(reply)]
        if page:
            after = page[-1][0]
        yield page
