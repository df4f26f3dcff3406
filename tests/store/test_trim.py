"""Invariant: trimming drops the entries that every group has acknowledged, and no others."""

import asyncio
import uuid
from typing import Literal

import pytest
import redis.exceptions
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.samples import JOB, prompt
from tests.store.conftest import CODEC
from tlt.protocol.commands import PromptIssued
from tlt.store.redis_connection import Connection, connect
from tlt.store.redis_keys import Keys
from tlt.store.redis_stream import Consumer, Stream

GROUPS = ("coordinator", "reward")
Move = tuple[Literal["add", "read", "acknowledge", "trim"], int, int]

moves = st.lists(
    st.tuples(
        st.sampled_from(["add", "read", "acknowledge", "trim"]),
        st.integers(0, 1),
        st.integers(0, 5),
    ),
    min_size=5,
    max_size=30,
)


@settings(max_examples=20)
@given(moves=moves)
def test_trims_exactly_the_entries_that_no_group_needs(redis_url: str, moves: list[Move]) -> None:
    asyncio.run(_play(redis_url, moves))


async def _play(redis_url: str, moves: list[Move]) -> None:
    async with connect(redis_url) as connection:
        stream = Stream(connection, Keys(uuid.uuid4().hex).prompts(JOB), CODEC)
        consumers = []
        for group in GROUPS:
            await stream.ensure_group(group)
            consumers.append(Consumer(stream, group, "only"))
        added: list[str] = []
        held: list[list[str]] = [[], []]
        acknowledged: list[set[str]] = [set(), set()]
        for move, group, number in [*moves, ("trim", 0, 0)]:
            if move == "add":
                added += await _add(connection, stream, number)
            elif move == "read":
                entries = await consumers[group].read(number + 1, 1)
                held[group] += [entry.id for entry in entries]
            elif move == "acknowledge" and held[group]:
                id_ = held[group].pop(number % len(held[group]))
                await connection.xack(stream.key, GROUPS[group], id_)
                acknowledged[group].add(id_)
            else:
                await stream.trim()
                left = [id_.decode() for id_, _ in await connection.xrange(stream.key)]
                both = acknowledged[0] & acknowledged[1]
                done = next((i for i, id_ in enumerate(added) if id_ not in both), len(added))
                assert left == added[done:]
        await connection.delete(stream.key)


async def _add(connection: Connection, stream: Stream[PromptIssued], count: int) -> list[str]:
    """Add entries in one transaction, so that their ids differ in the sequence number alone."""
    async with connection.pipeline(transaction=True) as transaction:
        for index in range(count):
            stream.add(transaction, prompt(index))
        return [id_.decode() for id_ in await transaction.execute()]


async def test_trims_no_stream_without_groups(connection: Connection, keys: Keys) -> None:
    stream = Stream(connection, keys.prompts(JOB), CODEC)
    await _add(connection, stream, 1)
    await stream.trim()
    assert await connection.xlen(stream.key) == 1


async def test_raises_for_a_stream_that_does_not_exist(connection: Connection, keys: Keys) -> None:
    with pytest.raises(redis.exceptions.ResponseError, match="no such key"):
        await Stream(connection, keys.prompts(JOB), CODEC).trim()
