"""A connection whose blocking reads another task can end at once."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

import redis.exceptions

from tlt.store.redis_connection import CONNECTION_ERRORS, Connection

# until the server is asked again to end a read that it may not have had yet
_AGAIN_SECONDS = 0.01
_Result = TypeVar("_Result")


class BlockingConnection:
    def __init__(self, shared: Connection) -> None:
        self.connection: Connection = shared.client()
        self._shared = shared
        # the connection's id on the server; without it reads block for their full time
        self._id: int | None = None
        self._reading = False

    async def identify(self) -> None:
        """Call it before the first read, and before the first read after a failed one."""
        if self._id is None:
            with contextlib.suppress(redis.exceptions.ResponseError):
                self._id = int(await self.connection.client_id())

    def reset(self) -> None:
        """Call it after a read has failed: the next connection has another number."""
        self._id = None

    async def read(self, read: Coroutine[Any, Any, _Result]) -> _Result:
        """Await a read of this connection, which `unblock` can end."""
        self._reading = True
        try:
            return await read
        finally:
            self._reading = False

    async def unblock(self) -> None:
        """End a read that runs now as if its time were over: it returns nothing."""
        while self._reading and not await self._is_unblocked():  # noqa: ASYNC110
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _is_unblocked(self) -> bool:
        if self._id is None:
            return True
        try:
            return bool(await self._shared.client_unblock(self._id))
        except (*CONNECTION_ERRORS, redis.exceptions.ResponseError):
            return True

    async def close(self) -> None:
        await self.connection.aclose()
