"""Streams: at-least-once delivery to consumer groups, committed in one transaction per batch.

An entry is delivered again until it is acknowledged in the same transaction as its effects.
What a dead consumer held is found by owner, never by age: the tail is old and healthy.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import redis.exceptions

from tlt.errors import StoreError
from tlt.ids import EntryId
from tlt.store.message_codec import Codec, Fields
from tlt.store.redis_connection import Connection, Transaction

_Message = TypeVar("_Message")


class Entry(NamedTuple, Generic[_Message]):
    id: EntryId
    message: _Message


class Undecodable(NamedTuple):
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

    async def held_by(self, group: str, consumer: str) -> list[tuple[EntryId, Fields]]:
        """What a consumer was given and has not acknowledged, oldest first."""
        held: list[tuple[EntryId, Fields]] = []
        start = "-"
        while True:
            try:
                page = await self.connection.xpending_range(
                    self.key, group, min=start, max="+", count=500, consumername=consumer
                )
            except redis.exceptions.ResponseError as error:
                if "NOGROUP" in str(error):
                    return []  # the stream was deleted: its job has ended
                raise
            for row in page:
                id_ = row["message_id"]
                for _, fields in await self.connection.xrange(self.key, min=id_, max=id_):
                    held.append((_entry_id(id_), fields))
            if len(page) < 500:
                return held
            start = f"({page[-1]['message_id'].decode()}"

    async def consumers(self, group: str) -> list[str]:
        rows = await self.connection.xinfo_consumers(self.key, group)
        return [row["name"].decode() for row in rows]

    def acknowledge(self, transaction: Transaction, group: str, ids: Iterable[EntryId]) -> None:
        ids = list(ids)
        if ids:
            transaction.xack(self.key, group, *ids)

    async def trim(self) -> None:
        """Drop what every group has acknowledged, and nothing else.

        MAXLEN would drop unacknowledged entries; MINID below the oldest one that somebody still
        needs cannot.
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
    """One reader of a group. Entries it holds are not given to it again while it lives.

    A reply that was lost with its connection leaves entries pending that nobody saw: after any
    error the next read looks through its own pending entries first.
    """

    def __init__(self, stream: Stream[_Message], group: str, name: str) -> None:
        self.stream = stream
        self.group = group
        self.name = name
        self.undecodable: list[Undecodable] = []
        self._held: set[EntryId] = set()
        self._look_back = True

    def look_back(self) -> None:
        """Read pending entries again: a reply was lost."""
        self._look_back = True

    async def read(self, count: int, block_ms: int | None) -> list[Entry[_Message]]:
        try:
            if self._look_back:
                missed = await self._pending()
                if missed:
                    return missed
                self._look_back = False
            reply = await self.stream.connection.xreadgroup(
                self.group, self.name, {self.stream.key: ">"}, count=count, block=block_ms
            )
        except redis.exceptions.ResponseError as error:
            if any(word in str(error) for word in ("NOGROUP", "UNBLOCKED")):
                return []  # the stream was deleted: its job has ended
            raise
        except BaseException:
            self._look_back = True
            raise
        return self._decode(rows(reply))

    async def _pending(self) -> list[Entry[_Message]]:
        reply = await self.stream.connection.xreadgroup(
            self.group, self.name, {self.stream.key: "0"}
        )
        return self._decode([row for row in rows(reply) if _entry_id(row[0]) not in self._held])

    def _decode(self, found: Sequence[tuple[bytes, Fields]]) -> list[Entry[_Message]]:
        entries: list[Entry[_Message]] = []
        for id_, fields in found:
            entry_id = _entry_id(id_)
            self._held.add(entry_id)
            try:
                entries.append(Entry(entry_id, self.stream.codec.decode(fields)))
            except StoreError as error:
                self.undecodable.append(Undecodable(entry_id, fields, str(error)))
        return entries

    def acknowledge(self, transaction: Transaction, ids: Iterable[EntryId]) -> None:
        """Call `forget` with the same ids once the transaction is through."""
        self.stream.acknowledge(transaction, self.group, ids)

    def forget(self, ids: Iterable[EntryId]) -> None:
        self._held.difference_update(ids)

    async def bury_undecodable(self, dead_letters: str) -> list[Undecodable]:
        """Move what cannot be read to the dead letters, with its error."""
        buried, self.undecodable = self.undecodable, []
        if not buried:
            return []
        async with self.stream.connection.pipeline(transaction=True) as transaction:
            for entry in buried:
                bury(transaction, dead_letters, self.stream.key, entry.fields, entry.error)
            self.acknowledge(transaction, [entry.id for entry in buried])
            await transaction.execute()
        self.forget(entry.id for entry in buried)
        return buried


def bury(
    transaction: Transaction, dead_letters: str, source: str, fields: Fields, error: str
) -> None:
    transaction.xadd(
        dead_letters,
        {**fields, b"source": source.encode(), b"error": error.encode()},
    )


def rows(reply: Any) -> list[tuple[bytes, Fields]]:
    """redis-py answers a list of pairs under RESP2 and a mapping under RESP3."""
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
