"""What is followed only while somebody listens."""

import asyncio
import contextlib
from abc import ABC, abstractmethod

from tlt.dashboard.broadcast import Channel


class Follower(ABC):
    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._task: asyncio.Task[None] | None = None

    def listen(self, bell: asyncio.Event) -> None:
        self.channel.listen(bell)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._follow())

    def leave(self, bell: asyncio.Event) -> None:
        self.channel.leave(bell)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    @abstractmethod
    async def _follow(self) -> None:
        """Ends when nobody listens any more."""
