"""Invariant: effect, events and acknowledgement happen together or not at all.

An unreadable entry stops no consumer.
"""

from typing import Any

import pytest

from tests.samples import JOB
from tests.store.test_streams import indices, pending, put
from tlt.protocol.commands import CancelJob, PromptIssued
from tlt.protocol.events import AnyEvent
from tlt.protocol.refs import SCHEMA_VERSION
from tlt.store.message_codec import Codec
from tlt.store.redis_connection import Connection
from tlt.store.redis_keys import ROLLOUT, Keys
from tlt.store.redis_stream import MOST_DEAD_LETTERS, Consumer, Stream, add_dead_letter

EVENTS = Codec[AnyEvent](AnyEvent)


@pytest.mark.parametrize("fails", [True, False])
async def test_commits_effect_events_and_acknowledgement_together(
    fails: bool, connection: Connection, stream: Stream[PromptIssued], keys: Keys
) -> None:
    events = Stream(connection, keys.events, EVENTS)
    await put(stream, 1)
    consumer = Consumer(stream, ROLLOUT, "w")
    (entry,) = await consumer.read(10, 10)

    async def commit() -> None:
        async with connection.pipeline(transaction=True) as transaction:
            transaction.hset(keys.committed, "session", 1)
            events.add(transaction, CancelJob(job=JOB))
            consumer.acknowledge(transaction, [entry.id])
            if fails:
                raise ZeroDivisionError
            await transaction.execute()

    if fails:
        with pytest.raises(ZeroDivisionError):
            await commit()
    else:
        await commit()
    counts = (
        await connection.hlen(keys.committed),
        await connection.xlen(keys.events),
        1 - await pending(stream),
    )
    assert counts == ((0, 0, 0) if fails else (1, 1, 1))


async def _dead_letters(stream: Stream[PromptIssued], keys: Keys) -> list[dict[bytes, bytes]]:
    return [fields for _, fields in await stream.connection.xrange(keys.dead_letters)]


# --- unreadable entries


_VERSION = b"%d" % SCHEMA_VERSION
BAD: dict[str, tuple[dict[bytes, bytes], str]] = {
    "another schema": (
        {b"v": b"999", b"m": b"\x80"},
        f"message schema 999; this version reads schema {SCHEMA_VERSION}",
    ),
    "no schema": ({b"m": b"\x80"}, "message schema none"),
    "schema of bytes": ({b"v": b"\xff\xfe", b"m": b"\x80"}, "message schema �"),
    "no message": ({b"v": _VERSION}, "cannot be read"),
    "no MessagePack": ({b"v": _VERSION, b"m": b"\xc1"}, "cannot be read"),
    "no UTF-8": ({b"v": _VERSION, b"m": b"\x81\xa4type\xa1\xff"}, "cannot be read"),
    "another message": ({**EVENTS.encode(CancelJob(job=JOB))}, "cannot be read"),
}


@pytest.mark.parametrize("bad", BAD)
async def test_moves_unreadable_entries_to_the_dead_letters(
    bad: str, stream: Stream[PromptIssued], keys: Keys
) -> None:
    fields, complaint = BAD[bad]
    await put(stream, 1)
    await stream.connection.xadd(stream.key, fields)
    await put(stream, 2)
    consumer = Consumer(stream, ROLLOUT, "w")
    assert indices(await consumer.read(10, 10)) == [1, 2]
    (moved,) = await consumer.move_to_dead_letters(keys.dead_letters)
    assert complaint in moved.error
    assert await consumer.move_to_dead_letters(keys.dead_letters) == []
    (letter,) = await _dead_letters(stream, keys)
    extra: dict[bytes, Any] = {b"source": stream.key.encode(), b"error": moved.error.encode()}
    assert letter == {**fields, **extra}
    assert await pending(stream) == 2
    consumer.reread_pending()
    assert await consumer.read(10, 1) == []


async def test_keeps_only_the_last_dead_letters(stream: Stream[PromptIssued], keys: Keys) -> None:
    async with stream.connection.pipeline(transaction=True) as transaction:
        for number in range(MOST_DEAD_LETTERS + 3):
            fields = {b"m": b"%d" % number}
            add_dead_letter(transaction, keys.dead_letters, stream.key, fields, "why")
        await transaction.execute()
    letters = await _dead_letters(stream, keys)
    assert [int(letter[b"m"]) for letter in letters] == list(range(3, MOST_DEAD_LETTERS + 3))
