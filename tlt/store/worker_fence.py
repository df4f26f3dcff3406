"""A worker whose lease has ended can't write: its transactions fail from then on."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import redis.exceptions

from tlt.errors import TltError
from tlt.id_types import Incarnation, WorkerId
from tlt.store.redis_connection import Connection, Transaction
from tlt.store.redis_keys import Keys

# A fence only moves forward: a late call about an old incarnation doesn't admit it again.
_RAISE = """
local least = tonumber(redis.call('HGET', KEYS[1], ARGV[1]))
if not least or least < tonumber(ARGV[2]) then
    redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
end
"""


class Fenced(TltError):
    """The incarnation is over: a later one may have begun."""


async def admit(
    connection: Connection, keys: Keys, worker: WorkerId, incarnation: Incarnation
) -> None:
    """Let only this incarnation and later ones write from now on."""
    await connection.eval(_RAISE, 1, keys.fence, worker, incarnation)


async def fence_off(
    connection: Connection, keys: Keys, worker: WorkerId, incarnation: Incarnation
) -> None:
    """Let only incarnations after this one write from now on."""
    await connection.eval(_RAISE, 1, keys.fence, worker, incarnation + 1)


async def check(
    connection: Connection, keys: Keys, worker: WorkerId, incarnation: Incarnation
) -> None:
    """Raise Fenced if this incarnation is over."""
    _refuse(await connection.hget(keys.fence, worker), worker, incarnation)


@asynccontextmanager
async def transaction(
    connection: Connection, keys: Keys, worker: WorkerId, incarnation: Incarnation
) -> AsyncGenerator[Transaction]:
    """Execute what the body fills in, or raise Fenced and change nothing."""
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
                # Some worker's fence moved, rarely this one's, so check and try again.
                await pipe.watch(keys.fence)
                _refuse(await pipe.hget(keys.fence, worker), worker, incarnation)
                pipe.multi()
                pipe.command_stack = list(commands)
            else:
                return


def _refuse(least: bytes | None, worker: WorkerId, incarnation: Incarnation) -> None:
    if least is not None and incarnation < int(least):
        raise Fenced(f"{worker}: incarnation {incarnation} is over, {int(least)} has its place")
