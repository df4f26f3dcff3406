"""Invariant: an entry is delivered until it is acknowledged, and to a live consumer once."""

import asyncio
from collections.abc import Sequence

import pytest

from tests.samples import JOB, prompt
from tests.store.conftest import CODEC, Proxy
from tests.waiting import wait_until
from tlt.protocol.commands import PromptIssued
from tlt.store.blocking_read import BlockingConnection
from tlt.store.redis_connection import CONNECTION_ERRORS, Connection, connect
from tlt.store.redis_keys import ROLLOUT, Keys
from tlt.store.redis_stream import Consumer, Entry, Stream


async def put(stream: Stream[PromptIssued], *indices: int) -> None:
    async with stream.connection.pipeline(transaction=True) as transaction:
        for index in indices:
            stream.add(transaction, prompt(index))
        await transaction.execute()


async def settle(consumer: Consumer[PromptIssued], entries: Sequence[Entry[PromptIssued]]) -> None:
    ids = [entry.id for entry in entries]
    async with consumer.stream.connection.pipeline(transaction=True) as transaction:
        consumer.acknowledge(transaction, ids)
        await transaction.execute()
    consumer.forget(ids)


async def pending(stream: Stream[PromptIssued], group: str = ROLLOUT) -> int:
    return (await stream.connection.xpending(stream.key, group))["pending"]


def indices(entries: Sequence[Entry[PromptIssued]]) -> list[int]:
    return [entry.message.prompt for entry in entries]


async def test_delivers_own_pending_entries_before_new_ones(stream: Stream[PromptIssued]) -> None:
    await put(stream, 1, 2)
    assert indices(await Consumer(stream, ROLLOUT, "w").read(10, 10)) == [1, 2]
    await put(stream, 3)
    successor = Consumer(stream, ROLLOUT, "w")
    assert indices(await successor.read(1, 10)) == [1, 2]
    assert indices(await successor.read(10, 10)) == [3]
    assert await successor.read(10, 10) == []


async def test_delivers_no_acknowledged_entry_again(stream: Stream[PromptIssued]) -> None:
    await put(stream, 1, 2)
    consumer = Consumer(stream, ROLLOUT, "w")
    entries = await consumer.read(10, 10)
    await settle(consumer, entries[:1])
    assert indices(await Consumer(stream, ROLLOUT, "w").read(10, 10)) == [2]
    assert await pending(stream) == 1


async def test_delivers_pending_entries_to_a_live_consumer_once(
    stream: Stream[PromptIssued],
) -> None:
    consumer = Consumer(stream, ROLLOUT, "w")
    await put(stream, 1, 2)
    assert indices(await consumer.read(10, 10)) == [1, 2]
    consumer.reread_pending()
    await put(stream, 3)
    assert indices(await consumer.read(10, 10)) == [3]


async def test_shares_entries_within_a_group_but_not_between_groups(
    stream: Stream[PromptIssued],
) -> None:
    await stream.ensure_group("other")
    await stream.ensure_group("other")
    await put(stream, 1, 2, 3)
    first, second = (Consumer(stream, ROLLOUT, name) for name in "ab")
    assert indices(await first.read(2, 10)) == [1, 2]
    assert indices(await second.read(2, 10)) == [3]
    assert indices(await Consumer(stream, "other", "a").read(9, 10)) == [1, 2, 3]


@pytest.mark.parametrize("protocol", [2, 3])
async def test_reads_replies_of_both_protocols(protocol: int, redis_url: str, keys: Keys) -> None:
    client = connect(f"{redis_url}?protocol={protocol}")
    stream = Stream(client, keys.prompts(JOB), CODEC)
    await stream.ensure_group(ROLLOUT)
    consumer = Consumer(stream, ROLLOUT, "w")
    assert await consumer.read(10, 1) == []
    await put(stream, 1, 2)
    entries = await consumer.read(10, 10)
    assert indices(entries) == [1, 2]
    assert [id_ for id_, _ in await stream.pending(ROLLOUT, "w")] == [e.id for e in entries]
    await settle(consumer, entries)
    await stream.trim()
    assert await client.xlen(stream.key) == 0
    await client.aclose()


# --- lost connections


async def test_loses_no_entry_when_a_blocking_read_is_killed(
    connection: Connection, stream: Stream[PromptIssued], redis_url: str
) -> None:
    async with connect(redis_url) as client:
        consumer = Consumer(Stream(client, stream.key, CODEC), ROLLOUT, "w")
        await put(stream, 1)
        assert indices(await consumer.read(10, 10)) == [1]
        number = await client.client_id()
        reading = asyncio.create_task(consumer.read(10, 20_000))
        await wait_until(lambda: _blocks(connection, number), message="no read blocks")
        await connection.client_kill_filter(_id=number)
        with pytest.raises(CONNECTION_ERRORS):
            await reading
        await put(stream, 2)
        assert indices(await consumer.read(10, 1000)) == [2]


async def _blocks(connection: Connection, number: int) -> bool:
    clients = await connection.client_list()
    return any(c["id"] == str(number) and "b" in c["flags"] for c in clients)


async def test_delivers_entries_whose_reply_was_lost(
    connection: Connection, stream: Stream[PromptIssued], proxy: Proxy
) -> None:
    async with connect(proxy.url) as client:
        consumer = Consumer(Stream(client, stream.key, CODEC), ROLLOUT, "w")
        await put(stream, 1)
        assert indices(await consumer.read(10, 10)) == [1]
        number = await client.client_id()
        proxy.swallowing = True
        await put(stream, 2, 3)
        reading = asyncio.create_task(consumer.read(10, 20_000))
        await proxy.swallowed.wait()
        assert await pending(stream) == 3
        await connection.client_kill_filter(_id=number)
        with pytest.raises(CONNECTION_ERRORS):
            await reading
        await put(stream, 4)
        assert indices(await consumer.read(10, 10)) == [2, 3]
        assert indices(await consumer.read(10, 10)) == [4]


async def test_cancelled_read_loses_nothing(stream: Stream[PromptIssued], proxy: Proxy) -> None:
    async with connect(proxy.url) as client:
        consumer = Consumer(Stream(client, stream.key, CODEC), ROLLOUT, "w")
        assert await consumer.read(10, 1) == []
        proxy.swallowing = True
        await put(stream, 1)
        reading = asyncio.create_task(consumer.read(10, 20_000))
        await proxy.swallowed.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert indices(await consumer.read(10, 10)) == [1]


async def test_reading_under_constant_cancellation_sees_everything_once(
    stream: Stream[PromptIssued], redis_url: str
) -> None:
    seen: list[int] = []
    async with connect(redis_url) as client:
        consumer = Consumer(Stream(client, stream.key, CODEC), ROLLOUT, "w")
        for start in range(0, 100, 5):
            await put(stream, *range(start, start + 5))
            for hasty in (True, True, False):
                try:
                    async with asyncio.timeout(0.001 if hasty else None):
                        entries = await consumer.read(2, 1)
                except TimeoutError:
                    continue
                seen += indices(entries)
                await settle(consumer, entries[:1])
        while entries := await consumer.read(10, 1):
            seen += indices(entries)
    assert sorted(seen) == list(range(100))


# --- deleted streams and entries


async def test_stream_that_is_gone_reads_as_empty(
    connection: Connection, stream: Stream[PromptIssued], redis_url: str
) -> None:
    async with connect(redis_url) as client:
        consumer = Consumer(Stream(client, stream.key, CODEC), ROLLOUT, "w")
        assert await consumer.read(10, 1) == []
        number = await client.client_id()
        reading = asyncio.create_task(consumer.read(10, 20_000))
        await wait_until(lambda: _blocks(connection, number), message="no read blocks")
        await connection.delete(stream.key)
        await put(stream, 1)  # older servers notice the deletion only now
        assert await reading == []
        assert await consumer.read(10, 1) == []


async def test_skips_a_pending_entry_that_was_deleted(stream: Stream[PromptIssued]) -> None:
    await put(stream, 1, 2)
    entries = await Consumer(stream, ROLLOUT, "w").read(10, 10)
    await stream.connection.xdel(stream.key, entries[0].id)
    successor = Consumer(stream, ROLLOUT, "w")
    assert indices(await successor.read(10, 10)) == [2]
    assert successor.unreadable == []
    assert [id_ for id_, _ in await stream.pending(ROLLOUT, "w")] == [entries[1].id]


async def test_unblocks_a_blocking_read_at_once(
    connection: Connection, stream: Stream[PromptIssued]
) -> None:
    blocking = BlockingConnection(connection)
    own = Stream(blocking.connection, stream.key, CODEC)
    consumer = Consumer(own, ROLLOUT, "w")
    assert await consumer.read(1, None) == []
    await blocking.unblock()  # nothing reads
    await blocking.identify()
    number = await blocking.connection.client_id()
    began = asyncio.get_running_loop().time()
    reading = asyncio.create_task(blocking.read(consumer.read(1, 60_000)))
    await wait_until(lambda: _blocks(connection, number), message="no read blocks")
    await blocking.unblock()
    assert await reading == []
    reading = asyncio.create_task(blocking.read(consumer.read(1, 60_000)))
    await asyncio.sleep(0)  # the server may not have the read yet
    await blocking.unblock()
    assert await reading == []
    assert asyncio.get_running_loop().time() - began < 30
    await blocking.unblock()
    await put(stream, 1)
    assert indices(await consumer.read(1, 60_000)) == [1]
    await blocking.close()
