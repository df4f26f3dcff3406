"""Invariant: a worker whose lease has ended writes nothing, and a fence never moves back.

Other workers never wait for it.
"""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tlt.base.id_types import Incarnation, WorkerId
from tlt.store.redis_connection import Connection
from tlt.store.redis_keys import Keys
from tlt.store.worker_fence import Fenced, FencePlace, admit, fence_off, transaction

WORKER, OTHER = WorkerId("worker-0"), WorkerId("worker-1")


def _place(
    connection: Connection, keys: Keys, incarnation: int, worker: WorkerId = WORKER
) -> FencePlace:
    return FencePlace(connection, keys, worker, Incarnation(incarnation))


async def _write(connection: Connection, keys: Keys, incarnation: int) -> None:
    async with transaction(_place(connection, keys, incarnation)) as pipe:
        pipe.rpush(keys.jobs, incarnation)


async def _written(connection: Connection, keys: Keys) -> list[int]:
    return [int(value) for value in await connection.lrange(keys.jobs, 0, -1)]


async def test_refuses_older_incarnations(connection: Connection, keys: Keys) -> None:
    await _write(connection, keys, 4)
    await admit(_place(connection, keys, 4))
    await _write(connection, keys, 4)
    await admit(_place(connection, keys, 6))
    await _write(connection, keys, 6)
    for incarnation in (4, 5):
        with pytest.raises(Fenced, match=f"incarnation {incarnation} is over, 6 has its place"):
            await _write(connection, keys, incarnation)
    assert await _written(connection, keys) == [4, 4, 6]


async def test_refuses_a_fenced_worker(connection: Connection, keys: Keys) -> None:
    await admit(_place(connection, keys, 4))
    await fence_off(_place(connection, keys, 4))
    with pytest.raises(Fenced):
        await _write(connection, keys, 4)
    await _write(connection, keys, 5)
    assert await _written(connection, keys) == [5]


@pytest.mark.parametrize("late", [admit, fence_off])
async def test_never_moves_a_fence_back(
    late: Callable[[FencePlace], Awaitable[None]], connection: Connection, keys: Keys
) -> None:
    await admit(_place(connection, keys, 17))
    await late(_place(connection, keys, 9))
    with pytest.raises(Fenced):
        await _write(connection, keys, 16)
    await _write(connection, keys, 17)


async def test_refuses_a_transaction_whose_fence_moved_meanwhile(
    connection: Connection, keys: Keys
) -> None:
    await admit(_place(connection, keys, 4))

    async def be_overtaken() -> None:
        async with transaction(_place(connection, keys, 4)) as pipe:
            pipe.rpush(keys.jobs, 4)
            await fence_off(_place(connection, keys, 4))

    with pytest.raises(Fenced):
        await be_overtaken()
    assert await _written(connection, keys) == []


async def test_retries_when_the_fence_of_another_worker_moved(
    connection: Connection, keys: Keys
) -> None:
    await admit(_place(connection, keys, 4))
    async with transaction(_place(connection, keys, 4)) as pipe:
        pipe.rpush(keys.jobs, 1)
        pipe.rpush(keys.jobs, 2)
        await fence_off(_place(connection, keys, 3, OTHER))
    assert await _written(connection, keys) == [1, 2]


async def test_executes_every_transaction_once_while_fences_move(
    connection: Connection, keys: Keys
) -> None:
    async def move() -> None:
        for incarnation in range(40):
            await admit(_place(connection, keys, incarnation, OTHER))

    await asyncio.gather(move(), *(_write(connection, keys, n) for n in range(40)))
    assert sorted(await _written(connection, keys)) == list(range(40))


async def test_changes_nothing_after_an_error_in_the_body(
    connection: Connection, keys: Keys
) -> None:
    async def fail() -> None:
        async with transaction(_place(connection, keys, 1)) as pipe:
            pipe.rpush(keys.jobs, 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert await _written(connection, keys) == []
