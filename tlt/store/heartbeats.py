"""Heartbeats of a session's workers, one for each worker."""

import msgspec

from tlt.id_types import WorkerId
from tlt.protocol.shared_values import Heartbeat
from tlt.store.redis_connection import Connection
from tlt.store.redis_keys import Keys


async def read_heartbeats(connection: Connection, keys: Keys) -> dict[WorkerId, Heartbeat]:
    raw = await connection.hgetall(keys.heartbeats)
    return {
        WorkerId(worker.decode()): msgspec.msgpack.decode(heartbeat, type=Heartbeat)
        for worker, heartbeat in sorted(raw.items())
    }
