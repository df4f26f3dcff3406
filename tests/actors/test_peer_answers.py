"""A worker follows events about answers and idle workers, and skips unreadable entries."""

import asyncio

from tests.samples import JOB, ORIGIN, answer
from tests.waiting import wait_until
from tlt.actors.run_until_one_fails import cancel_all
from tlt.actors.worker.peer_answers import follow_peers, read_newest
from tlt.protocol.commands import CancelJob
from tlt.protocol.events import AnyEvent, RolloutFinished, WorkerIdled
from tlt.store.message_codec import Codec
from tlt.store.redis_connection import Connection
from tlt.store.redis_keys import Keys
from tlt.store.redis_stream import Stream


async def test_follows_answers_and_idle_workers_and_nothing_else(
    connection: Connection, keys: Keys
) -> None:
    events = Stream(connection, keys.events, Codec[AnyEvent](AnyEvent))
    found: list[RolloutFinished | WorkerIdled] = []

    async def follow() -> None:
        async for event in follow_peers(events, 2):
            found.append(event)

    following = asyncio.create_task(follow())

    async def send(event: AnyEvent) -> None:
        async with connection.pipeline(transaction=True) as transaction:
            events.add(transaction, event)
            await transaction.execute()

    async def is_followed() -> bool:
        """Return True once the first read has reached the server, which starts the following."""
        await send(answer(0))
        return bool(found)

    await wait_until(is_followed)
    found.clear()
    idled = WorkerIdled(**ORIGIN, requeues=0)  # pyright: ignore
    await send(idled)
    await send(CancelJob(job=JOB))
    await connection.xadd(keys.events, {b"not": b"an event"})
    await send(answer(1))
    await send(answer(2))
    await wait_until(lambda: answer(2) in found)
    assert [event for event in found if event != answer(0)] == [idled, answer(1), answer(2)]
    await cancel_all([following])
    await connection.delete(keys.events)


async def test_leaves_out_the_oldest_of_many(connection: Connection, keys: Keys) -> None:
    events = Stream(connection, keys.events, Codec[AnyEvent](AnyEvent))
    ids = [await connection.xadd(keys.events, {b"n": b"%d" % n}) for n in range(200)]
    page = await read_newest(events, ids[9].decode())
    assert [fields for _, fields in page] == [{b"n": b"%d" % n} for n in range(136, 200)]
    page = await read_newest(events, ids[149].decode())
    assert [id_ for id_, _ in page] == ids[150:]
    await connection.delete(keys.events)
