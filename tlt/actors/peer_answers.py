"""Follow the answers of other workers, which this worker's ranks use for proposals and training.

A missed answer costs no more than a proposal, so only new events are read, without a group, and
nothing is acknowledged.
"""

from collections.abc import AsyncGenerator

from tlt.actors.ungrouped_stream_reader import read_pages
from tlt.errors import StoreError
from tlt.protocol.events import AnyEvent, RolloutFinished, WorkerIdled
from tlt.store.redis_stream import Stream

_BLOCK_MS = 1000


async def follow_peers(
    events: Stream[AnyEvent],
) -> AsyncGenerator[RolloutFinished | WorkerIdled]:
    """Yield the session's new events about answers and idle workers."""
    pages = read_pages(events.connection, events.key, after="$", count=100, block_ms=_BLOCK_MS)
    async for page in pages:
        for _, fields in page:
            try:
                event = events.codec.decode(fields)
            except StoreError:
                continue  # the coordinator moves it to the dead letters
            if isinstance(event, RolloutFinished | WorkerIdled):
                yield event
