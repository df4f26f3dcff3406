"""A feed follows something for its listeners, and does nothing while it has none."""

import asyncio
import contextlib
from abc import ABC, abstractmethod

from tlt.dashboard.broadcast import Broadcast


class Feed(ABC):
    def __init__(self, broadcast: Broadcast) -> None:
        self.broadcast = broadcast
        self._task: asyncio.Task[None] | None = None

    def add_listener(self, wakeup: asyncio.Event) -> None:
        self.broadcast.add_listener(wakeup)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._follow())

    def remove_listener(self, wakeup: asyncio.Event) -> None:
        self.broadcast.remove_listener(wakeup)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    @abstractmethod
    def full_state(self) -> bytes:
        """Return all that a new listener has to know."""

    @abstractmethod
    async def _follow(self) -> None:
        """Publish changes until the last listener has left."""
