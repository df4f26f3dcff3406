"""Answers and idlers are heard as they come; what cannot be read, or is gone, is passed over."""

import asyncio

from tests.samples import JOB, ORIGIN, answer
from tests.waiting import wait_until
from tlt.actors.cancellation import cancel_all
from tlt.actors.peer_answers import follow_peers
from tlt.protocol.events import AnyEvent, JobCancelRequested, RolloutFinished, WorkerIdled
from tlt.store.message_codec import Codec
from tlt.store.redis_connection import Connection
from tlt.store.redis_keys import Keys
from tlt.store.redis_stream import Stream


async def test_answers_and_idlers_are_heard_and_nothing_else(
    connection: Connection, keys: Keys
) -> None:
    events = Stream(connection, keys.events, Codec[AnyEvent](AnyEvent))
    heard: list[RolloutFinished | WorkerIdled] = []

    async def listen() -> None:
        async for event in follow_peers(events):
            heard.append(event)

    listening = asyncio.create_task(listen())

    async def say(event: AnyEvent) -> None:
        async with connection.pipeline(transaction=True) as transaction:
            events.add(transaction, event)
            await transaction.execute()

    async def is_heard() -> bool:
        """It hears from the moment on that its first read has arrived."""
        await say(answer(0))
        return bool(heard)

    await wait_until(is_heard)
    heard.clear()
    idled = WorkerIdled(**ORIGIN, requeues=0)  # pyright: ignore
    await say(idled)
    await say(JobCancelRequested(job=JOB))
    await connection.xadd(keys.events, {b"not": b"an event"})
    await say(answer(1))
    await say(answer(2))
    await wait_until(lambda: answer(2) in heard)
    assert [event for event in heard if event != answer(0)] == [idled, answer(1), answer(2)]
    await cancel_all([listening])
    await connection.delete(keys.events)
