"""Streams deliver at least once to consumer groups; a batch is committed in one transaction.

An entry is delivered again until it is acknowledged in the same transaction as its effects.
Entries of a lost consumer are found by owner, never by age, because entries of long answers get old
without an error.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import redis.exceptions

from tlt.base.id_types import EntryId
from tlt.errors import StoreError
from tlt.store.message_codec import Codec, Fields
from tlt.store.redis_connection import CONNECTION_ERRORS, Connection, Transaction

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


_Message = TypeVar("_Message")
_PAGE = 500
MOST_DEAD_LETTERS = 1000


class Entry(NamedTuple, Generic[_Message]):
    id: EntryId
    message: _Message


class UnreadableEntry(NamedTuple):
    id: EntryId
    fields: Fields
    error: str


class Stream(Generic[_Message]):
    def __init__(self, connection: Connection, key: str, codec: Codec[_Message]) -> None:
        self.connection = connection
        self.key = key
        self.codec = codec

    def add(self, transaction: Transaction, message: _Message) -> None:
        transaction.xadd(self.key, self.codec.encode(message))

    async def ensure_group(self, group: str) -> None:
        try:
            await self.connection.xgroup_create(self.key, group, id="0", mkstream=True)
        except redis.exceptions.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def pending(self, group: str, consumer: str) -> list[tuple[EntryId, Fields]]:
        """Return the entries that a consumer has not acknowledged, oldest first."""
        found: list[tuple[EntryId, Fields]] = []
        start = "-"
        while True:
            try:
                page = await self.connection.xpending_range(
                    self.key, group, min=start, max="+", count=_PAGE, consumername=consumer
                )
            except redis.exceptions.ResponseError as error:
                if "NOGROUP" in str(error):
                    return []  # the stream was deleted: its job has ended
                raise
            for row in page:
                id_ = row["message_id"]
                for _, fields in await self.connection.xrange(self.key, min=id_, max=id_):
                    found.append((_entry_id(id_), fields))
            if len(page) < _PAGE:
                return found
            start = f"({page[-1]['message_id'].decode()}"

    def acknowledge(self, transaction: Transaction, group: str, ids: Iterable[EntryId]) -> None:
        ids = list(ids)
        # a script passes on some thousand words at once
        for start in range(0, len(ids), _PAGE):
            transaction.xack(self.key, group, *ids[start : start + _PAGE])

    async def trim(self) -> None:
        """Drop the entries that every group has acknowledged, and no others.

        MAXLEN could drop unacknowledged entries; MINID at the oldest one that is needed can't.
        """
        needed: list[tuple[int, int]] = []
        for group in await self.connection.xinfo_groups(self.key):
            pending = await self.connection.xpending(self.key, group["name"])
            if pending["pending"]:
                needed.append(_position(pending["min"]))
            else:
                milliseconds, sequence = _position(group["last-delivered-id"])
                needed.append((milliseconds, sequence + 1))
        if needed:
            milliseconds, sequence = min(needed)
            await self.connection.xtrim(
                self.key, minid=f"{milliseconds}-{sequence}", approximate=False
            )


class Consumer(Generic[_Message]):
    """One reader of a group, which gets each entry once as long as it runs.

    A reply that is lost with its connection leaves entries pending that the reader never saw, so
    after any error the next read begins with the reader's pending entries.
    """

    def __init__(self, stream: Stream[_Message], group: str, name: str) -> None:
        self.stream = stream
        self.group = group
        self.name = name
        self.unreadable: list[UnreadableEntry] = []
        self._delivered: set[EntryId] = set()
        self._reread = True

    def reread_pending(self) -> None:
        """Begin the next read with the pending entries: a reply may have been lost."""
        self._reread = True

    async def read(self, count: int, block_ms: int | None) -> list[Entry[_Message]]:
        try:
            if self._reread:
                missed = await self._read_pending()
                if missed:
                    return missed
                self._reread = False
            reply = await self.stream.connection.xreadgroup(
                self.group, self.name, {self.stream.key: ">"}, count=count, block=block_ms
            )
        except redis.exceptions.ResponseError as error:
            if any(word in str(error) for word in ("NOGROUP", "UNBLOCKED")):
                return []  # the stream was deleted: its job has ended
            raise
        except BaseException:
            self._reread = True
            raise
        return self._decode(reply_entries(reply))

    async def _read_pending(self) -> list[Entry[_Message]]:
        reply = await self.stream.connection.xreadgroup(
            self.group, self.name, {self.stream.key: "0"}
        )
        missed = [row for row in reply_entries(reply) if _entry_id(row[0]) not in self._delivered]
        return self._decode(missed)

    def _decode(self, found: Sequence[tuple[bytes, Fields]]) -> list[Entry[_Message]]:
        entries: list[Entry[_Message]] = []
        for id_, fields in found:
            entry_id = _entry_id(id_)
            self._delivered.add(entry_id)
            try:
                entries.append(Entry(entry_id, self.stream.codec.decode(fields)))
            except StoreError as error:
                self.unreadable.append(UnreadableEntry(entry_id, fields, str(error)))
        return entries

    async def drop(self, entries: Sequence[Entry[_Message]]) -> None:
        """Acknowledge entries that nothing is done with."""
        if not entries:
            return
        ids = [entry.id for entry in entries]
        async with self.stream.connection.pipeline(transaction=True) as transaction:
            self.acknowledge(transaction, ids)
            await transaction.execute()
        self.forget(ids)

    def acknowledge(self, transaction: Transaction, ids: Iterable[EntryId]) -> None:
        """Call `forget` with the same ids once the transaction has been executed."""
        self.stream.acknowledge(transaction, self.group, ids)

    def forget(self, ids: Iterable[EntryId]) -> None:
        self._delivered.difference_update(ids)

    async def move_to_dead_letters(self, dead_letters: str) -> list[UnreadableEntry]:
        """Move unreadable entries to the dead letters, each with its error."""
        moved = self.unreadable
        if not moved:
            return []
        async with self.stream.connection.pipeline(transaction=True) as transaction:
            for entry in moved:
                add_dead_letter(
                    transaction, dead_letters, self.stream.key, entry.fields, entry.error
                )
            self.acknowledge(transaction, [entry.id for entry in moved])
            await transaction.execute()
        self.unreadable = []
        self.forget(entry.id for entry in moved)
        return moved


def add_dead_letter(
    transaction: Transaction, dead_letters: str, source: str, fields: Fields, error: str
) -> None:
    """Keep the last ones: nothing but people reads them."""
    transaction.xadd(
        dead_letters,
        {**fields, b"source": source.encode(), b"error": error.encode()},
        maxlen=MOST_DEAD_LETTERS,
        approximate=False,
    )


def reply_entries(reply: Any) -> list[tuple[bytes, Fields]]:
    """Return the entries of a reply: redis-py gives pairs under RESP2, a mapping under RESP3."""
    if not reply:
        return []
    streams = reply.values() if isinstance(reply, dict) else [entries for _, entries in reply]
    found: list[tuple[bytes, Fields]] = []
    for entries in streams:
        # a deleted entry that is still pending comes without fields
        nested = entries[0] if entries and isinstance(entries[0], list) else entries
        found.extend((id_, fields) for id_, fields in nested if fields)
    return found


def _entry_id(raw: bytes) -> EntryId:
    return EntryId(raw.decode())


def _position(raw: bytes) -> tuple[int, int]:
    milliseconds, _, sequence = raw.decode().partition("-")
    return int(milliseconds), int(sequence or 0)
