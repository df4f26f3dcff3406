"""A worker whose lease has ended can't write: its transactions fail from then on."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import redis.exceptions

from tlt.base.id_types import Incarnation, WorkerId
from tlt.errors import TltError
from tlt.store.guarded_commands import Guard
from tlt.store.redis_connection import Connection, Transaction
from tlt.store.redis_keys import Keys

# A fence only moves forward: a late call about an old incarnation doesn't admit it again.
_RAISE = """
local least = tonumber(redis.call('HGET', KEYS[1], ARGV[1]))
if not least or least < tonumber(ARGV[2]) then
    redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
end
"""

_GUARD = Guard("""
local least = redis.call('HGET', KEYS[1], ARGV[1])
if least and tonumber(ARGV[2]) < tonumber(least) then
    return least
end
""")


class Fenced(TltError):
    """The incarnation is over: a later one may have begun."""


@dataclass(frozen=True)
class FencePlace:
    """An incarnation, and the Redis server that keeps the fence before it."""

    connection: Connection
    keys: Keys
    worker: WorkerId
    incarnation: Incarnation


async def admit(place: FencePlace) -> None:
    """Let only this incarnation and later ones write from now on."""
    await _raise_fence(place, place.incarnation)


async def fence_off(place: FencePlace) -> None:
    """Let only incarnations after this one write from now on."""
    await _raise_fence(place, place.incarnation + 1)


async def check(place: FencePlace) -> None:
    """Raise Fenced if this incarnation is over."""
    _refuse(await place.connection.hget(place.keys.fence, place.worker), place)


async def read_fences(connection: Connection, keys: Keys) -> dict[bytes, bytes]:
    """Return the lowest incarnation that may write, by worker."""
    return await connection.hgetall(keys.fence)


async def delete_commands_of_ended(
    connection: Connection, keys: Keys, fences: Mapping[bytes, bytes]
) -> None:
    """Delete the commands to incarnations that are over; a killed worker leaves its own."""
    for worker, least in fences.items():
        pattern = keys.commands(WorkerId(worker.decode()), "*")
        async for key in connection.scan_iter(match=pattern, count=1000):
            if int(key.rpartition(b":")[2]) < int(least):
                await connection.delete(key)


@asynccontextmanager
async def transaction(place: FencePlace) -> AsyncGenerator[Transaction]:
    """Execute what the body fills in, or raise Fenced and change nothing."""
    filled = place.connection.pipeline(transaction=False)
    yield filled
    least = await _GUARD.execute(
        place.connection, filled, place.keys.fence, place.worker, place.incarnation
    )
    _refuse(least, place)


async def _raise_fence(place: FencePlace, least: int) -> None:
    try:
        await place.connection.eval(_RAISE, 1, place.keys.fence, place.worker, least)
    except redis.exceptions.ResponseError as error:
        # before version 7 a script's error has another class
        if "OOM " in str(error):
            raise redis.exceptions.OutOfMemoryError(str(error)) from error
        raise


def _refuse(least: bytes | None, place: FencePlace) -> None:
    if least is not None and place.incarnation < int(least):
        over = f"incarnation {place.incarnation} is over, {int(least)} has its place"
        raise Fenced(f"{place.worker}: {over}")
