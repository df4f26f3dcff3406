"""Follow what other workers answer, so that this worker's ranks can guess and learn from it.

An answer that is missed costs a guess and nothing else, so events are read from now on, without a
group, and nothing is acknowledged.
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
    """Yield the answers and the idle workers that the session's events speak of from now on."""
    pages = read_pages(events.connection, events.key, after="$", count=100, block_ms=_BLOCK_MS)
    async for page in pages:
        for _, fields in page:
            try:
                event = events.codec.decode(fields)
            except StoreError:
                continue  # the coordinator moves it to the dead letters
            if isinstance(event, RolloutFinished | WorkerIdled):
                yield event
