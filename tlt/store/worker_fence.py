"""A worker whose lease ended writes nothing: its transactions fail, whenever it wakes up."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import redis.exceptions

from tlt.errors import TltError
from tlt.ids import Incarnation, WorkerId
from tlt.store.redis_connection import Connection, Transaction
from tlt.store.redis_keys import Keys

# A fence moves forward only: a late word about an old incarnation lets nobody back in.
_RAISE = """
local least = tonumber(redis.call('HGET', KEYS[1], ARGV[1]))
if not least or least < tonumber(ARGV[2]) then
    redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
end
"""


class Fenced(TltError):
    """Another incarnation took this one's place."""


async def admit(
    connection: Connection, keys: Keys, worker: WorkerId, incarnation: Incarnation
) -> None:
    """From now on only this incarnation and later ones may write."""
    await connection.eval(_RAISE, 1, keys.fence, worker, incarnation)


async def shut_out(
    connection: Connection, keys: Keys, worker: WorkerId, incarnation: Incarnation
) -> None:
    await connection.eval(_RAISE, 1, keys.fence, worker, incarnation + 1)


async def check(
    connection: Connection, keys: Keys, worker: WorkerId, incarnation: Incarnation
) -> None:
    """Raises Fenced where this incarnation is over."""
    _refuse(await connection.hget(keys.fence, worker), worker, incarnation)


@asynccontextmanager
async def transaction(
    connection: Connection, keys: Keys, worker: WorkerId, incarnation: Incarnation
) -> AsyncGenerator[Transaction]:
    """Fill it in the body; it is executed at its end, or Fenced is raised and nothing happens."""
    async with connection.pipeline(transaction=True) as pipe:
        await pipe.watch(keys.fence)
        _refuse(await pipe.hget(keys.fence, worker), worker, incarnation)
        pipe.multi()
        yield pipe
        commands = list(pipe.command_stack)
        while True:
            try:
                await pipe.execute()
            except redis.exceptions.WatchError:
                # Somebody's fence moved, hardly ever ours: look, and say the same again.
                await pipe.watch(keys.fence)
                _refuse(await pipe.hget(keys.fence, worker), worker, incarnation)
                pipe.multi()
                pipe.command_stack = list(commands)
            else:
                return


def _refuse(least: bytes | None, worker: WorkerId, incarnation: Incarnation) -> None:
    if least is not None and incarnation < int(least):
        raise Fenced(f"{worker}: incarnation {incarnation} is over, {int(least)} has its place")
