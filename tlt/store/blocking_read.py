"""A connection whose blocking reads another task can end at once."""

import contextlib

import redis.exceptions

from tlt.store.redis_connection import CONNECTION_ERRORS, Connection


class BlockingConnection:
    def __init__(self, shared: Connection) -> None:
        self.connection: Connection = shared.client()
        self._shared = shared
        # the connection's id on the server; without it reads block for their full time
        self._id: int | None = None

    async def identify(self) -> None:
        """Call it before the first read, and before the first read after a failed one."""
        if self._id is None:
            with contextlib.suppress(redis.exceptions.ResponseError):
                self._id = int(await self.connection.client_id())

    def reset(self) -> None:
        """Call it after a read has failed: the next connection has another number."""
        self._id = None

    async def unblock(self) -> None:
        """End a blocking read as if its time were over: it returns nothing."""
        if self._id is not None:
            with contextlib.suppress(*CONNECTION_ERRORS, redis.exceptions.ResponseError):
                await self._shared.client_unblock(self._id)

    async def close(self) -> None:
        await self.connection.aclose()
