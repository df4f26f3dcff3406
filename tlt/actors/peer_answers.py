"""What others answered reaches this worker's ranks, who guess and learn from it.

An answer that is missed costs a guess and nothing else: so events are read here without a group,
from now on, and nothing is acknowledged.
"""

import asyncio
from collections.abc import Callable

from tlt.errors import StoreError
from tlt.protocol.events import AnyEvent, RolloutFinished, WorkerIdled
from tlt.store.redis_connection import GONE
from tlt.store.redis_stream import Stream, rows

_BLOCK_MS = 1000


async def overhear(
    events: Stream[AnyEvent], hear: Callable[[RolloutFinished | WorkerIdled], None]
) -> None:
    last = "$"
    while True:
        try:
            reply = await events.connection.xread({events.key: last}, count=100, block=_BLOCK_MS)
        except GONE:
            await asyncio.sleep(0.1)
            continue
        for id_, fields in rows(reply):
            last = id_.decode()
            try:
                event = events.codec.decode(fields)
            except StoreError:
                continue  # the coordinator buries it
            if isinstance(event, RolloutFinished | WorkerIdled):
                hear(event)
