"""Read from Redis whether it has memory left and can write its file; if not, it refuses writes."""

import sys
from typing import Any

import msgspec

from tlt.base.human_format import size
from tlt.store.redis_connection import Connection


class RedisMemory(msgspec.Struct, frozen=True, kw_only=True):
    used: int
    # 0: no limit but the machine's
    limit: int
    # False if the last write of its append-only file failed
    writes_file: bool = True

    @property
    def free(self) -> int:
        return max(0, self.limit - self.used) if self.limit else sys.maxsize

    def complaint(self) -> str | None:
        """Return why Redis refuses writes, and what to do about it."""
        if not self.writes_file:
            return (
                "Redis refuses writes, because it can't write its file. "
                "Free space on its disk, and all goes on by itself"
            )
        if self.free == 0:
            return (
                f"Redis refuses writes: {size(self.used)} used of {size(self.limit)} (maxmemory). "
                "Raise maxmemory or free memory there, and all goes on by itself"
            )
        return None


async def read_memory(connection: Connection) -> RedisMemory:
    memory: dict[str, Any] = await connection.info("memory")
    persistence: dict[str, Any] = await connection.info("persistence")
    return from_info(memory, persistence)


def from_info(memory: dict[str, Any], persistence: dict[str, Any]) -> RedisMemory:
    return RedisMemory(
        used=int(memory.get("used_memory", 0)),
        limit=int(memory.get("maxmemory", 0)),
        writes_file=persistence.get("aof_last_write_status", "ok") == "ok",
    )
