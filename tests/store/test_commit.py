"""Invariant: effect, events and acknowledgement happen together or not at all.

An unreadable entry stops no consumer, and the entries of a dead one are delivered again.
"""

from typing import Any

import msgspec
import pytest

from tests.samples import JOB, prompt
from tests.store.conftest import CODEC
from tests.store.test_streams import indices, pending, put
from tlt.protocol.commands import CancelJob, PromptIssued
from tlt.protocol.events import AnyEvent
from tlt.protocol.refs import SCHEMA_VERSION
from tlt.store.message_codec import Codec
from tlt.store.prompt_requeue import requeue
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


# --- requeue


async def _requeue(
    stream: Stream[PromptIssued], keys: Keys, tries: int = 3, *, excused: bool = False
) -> list[int]:
    async with stream.connection.pipeline(transaction=True) as transaction:
        given_up = await requeue(
            stream,
            transaction,
            consumer="dead",
            max_tries=tries,
            dead_letters=keys.dead_letters,
            excused=excused,
        )
        await transaction.execute()
    return [lost.prompt for lost in given_up]


async def _dead_letters(stream: Stream[PromptIssued], keys: Keys) -> list[dict[bytes, bytes]]:
    return [fields for _, fields in await stream.connection.xrange(keys.dead_letters)]


@pytest.mark.parametrize("count", [2, 501])
async def test_requeues_prompts_of_a_dead_worker_at_the_end(
    count: int, stream: Stream[PromptIssued], keys: Keys
) -> None:
    await put(stream, *range(count + 1))
    await Consumer(stream, ROLLOUT, "dead").read(count, 10)
    assert await _requeue(stream, keys) == []
    assert await pending(stream) == 0
    entries = await Consumer(stream, ROLLOUT, "w").read(count + 1, 10)
    assert indices(entries) == [count, *range(count)]
    assert [entry.message.attempt for entry in entries] == [0] + [1] * count
    assert msgspec.structs.replace(entries[1].message, attempt=0) == prompt(0)


async def test_gives_a_prompt_up_after_max_tries(stream: Stream[PromptIssued], keys: Keys) -> None:
    await put(stream, 7)
    for given_up in ([], [], [7], []):
        await Consumer(stream, ROLLOUT, "dead").read(10, 1)
        assert await _requeue(stream, keys, tries=3) == given_up
    assert await pending(stream) == 0
    (letter,) = await _dead_letters(stream, keys)
    assert CODEC.decode(letter) == prompt(7, attempt=2)
    assert letter[b"error"] == b"its worker was lost 3 times"
    assert letter[b"source"] == stream.key.encode()


async def test_losses_with_the_whole_session_are_no_tries(
    stream: Stream[PromptIssued], keys: Keys
) -> None:
    await put(stream, 7)
    for excused, given_up in ((True, []), (False, []), (True, []), (True, []), (False, [7])):
        await Consumer(stream, ROLLOUT, "dead").read(10, 1)
        assert await _requeue(stream, keys, tries=2, excused=excused) == given_up


async def test_requeues_nothing_without_its_transaction(
    stream: Stream[PromptIssued], keys: Keys
) -> None:
    await put(stream, 1)
    (entry,) = await Consumer(stream, ROLLOUT, "dead").read(10, 10)
    async with stream.connection.pipeline(transaction=True) as transaction:
        await requeue(stream, transaction, consumer="dead", max_tries=1, dead_letters="letters")
    assert [id_ for id_, _ in await stream.pending(ROLLOUT, "dead")] == [entry.id]
    assert await stream.connection.xlen(stream.key) == 1


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


async def test_moves_unreadable_entries_of_a_dead_worker_to_the_dead_letters(
    stream: Stream[PromptIssued], keys: Keys
) -> None:
    await stream.connection.xadd(stream.key, {b"v": b"\xff", b"m": b""})
    await put(stream, 1)
    await Consumer(stream, ROLLOUT, "dead").read(10, 10)
    assert await _requeue(stream, keys) == []
    assert len(await _dead_letters(stream, keys)) == 1
    assert await pending(stream) == 0
    assert indices(await Consumer(stream, ROLLOUT, "w").read(10, 10)) == [1]
