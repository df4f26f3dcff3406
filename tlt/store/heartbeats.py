"""Heartbeats of a session's actors, one for each worker and each service."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable

import msgspec

from tlt.base.end_session_processes import identify
from tlt.base.id_types import WorkerId
from tlt.protocol.shared_values import Heartbeat, ServiceHeartbeat
from tlt.store.redis_connection import CONNECTION_ERRORS, Connection
from tlt.store.redis_keys import COORDINATOR, REWARD, Keys

SERVICES = (COORDINATOR, REWARD)


async def read_heartbeats(connection: Connection, keys: Keys) -> dict[WorkerId, Heartbeat]:
    raw = await connection.hgetall(keys.heartbeats)
    return {
        WorkerId(worker.decode()): msgspec.msgpack.decode(heartbeat, type=Heartbeat)
        for worker, heartbeat in sorted(raw.items())
    }


async def read_services(connection: Connection, keys: Keys) -> dict[str, ServiceHeartbeat]:
    raw = await connection.hgetall(keys.services)
    return {
        service.decode(): msgspec.msgpack.decode(heartbeat, type=ServiceHeartbeat)
        for service, heartbeat in raw.items()
    }


async def send_service_heartbeats(
    connection: Connection,
    keys: Keys,
    service: str,
    every_seconds: float,
    waiting: Callable[[], str | None] = lambda: None,
) -> None:
    """Beat until this is cancelled, in the service's own loop: one that is stuck doesn't beat."""
    own = identify(os.getpid())
    while True:
        beat = ServiceHeartbeat(
            pid=os.getpid(),
            start_ticks=own.start_ticks if own else 0,
            sent_at=time.time(),
            waiting=waiting(),
        )
        with contextlib.suppress(*CONNECTION_ERRORS):
            await connection.hset(keys.services, service, msgspec.msgpack.encode(beat))
        await asyncio.sleep(every_seconds)


async def forget_heartbeats(connection: Connection, keys: Keys) -> None:
    await connection.delete(keys.heartbeats, keys.services)
