"""What a worker reports: events, and the acknowledgement of the prompts that they are about.

All that waits leaves in one transaction, in order; it either counts whole or, where the worker's
lease ended, not at all.
"""

import asyncio
from typing import NamedTuple

from tlt.ids import EntryId, Incarnation, WorkerId
from tlt.protocol.commands import PromptIssued
from tlt.protocol.events import AnyEvent
from tlt.store import worker_fence
from tlt.store.redis_connection import Connection, persistently
from tlt.store.redis_keys import Keys
from tlt.store.redis_stream import Consumer, Stream


class _Item(NamedTuple):
    event: AnyEvent
    consumer: Consumer[PromptIssued] | None
    entry: EntryId | None


class Outbox:
    def __init__(
        self,
        connection: Connection,
        keys: Keys,
        events: Stream[AnyEvent],
        worker: WorkerId,
        incarnation: Incarnation,
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._events = events
        self._worker = worker
        self._incarnation = incarnation
        self._waiting: list[_Item] = []
        self._wake = asyncio.Event()

    def post(
        self,
        event: AnyEvent,
        consumer: Consumer[PromptIssued] | None = None,
        entry: EntryId | None = None,
    ) -> None:
        self._waiting.append(_Item(event, consumer, entry))
        self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await persistently(self.flush, asyncio.sleep)

    async def flush(self) -> None:
        batch = list(self._waiting)
        if not batch:
            return
        async with worker_fence.transaction(
            self._connection, self._keys, self._worker, self._incarnation
        ) as transaction:
            for item in batch:
                self._events.add(transaction, item.event)
                if item.consumer is not None and item.entry is not None:
                    item.consumer.acknowledge(transaction, [item.entry])
        del self._waiting[: len(batch)]
        for item in batch:
            if item.consumer is not None and item.entry is not None:
                item.consumer.forget([item.entry])
