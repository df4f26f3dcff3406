"""A connection for reads that block, so that somebody else can end such a read at once."""

import contextlib

import redis.exceptions

from tlt.store.redis_connection import GONE, Connection


class Waiter:
    def __init__(self, shared: Connection) -> None:
        self.connection: Connection = shared.client()
        self._shared = shared
        # as the server knows it; None where it does not say, and reads last as long as they may
        self._id: int | None = None

    async def ready(self) -> None:
        """Before the first read, and after one that failed."""
        if self._id is None:
            with contextlib.suppress(redis.exceptions.ResponseError):
                self._id = int(await self.connection.client_id())

    def lost(self) -> None:
        """The next connection is another one."""
        self._id = None

    async def wake(self) -> None:
        """A read that waits is answered with nothing, as if its time were over."""
        if self._id is not None:
            with contextlib.suppress(*GONE, redis.exceptions.ResponseError):
                await self._shared.client_unblock(self._id)

    async def close(self) -> None:
        await self.connection.aclose()
