"""A worker's way to Redis, which a test can cut: nothing gets through until it is joined again."""

import asyncio
import contextlib
from pathlib import Path


class Link:
    """Forward connections to Redis; while cut, they stand still, as those of a stopped process."""

    def __init__(self, socket: Path, target: Path) -> None:
        self.url = f"unix://{socket}"
        self._socket = socket
        self._target = target
        self._server: asyncio.Server | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._forwarding: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._accept, self._socket)

    def cut(self) -> None:
        self._open.clear()

    def join(self) -> None:
        self._open.set()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await asyncio.sleep(0)  # what was just accepted
        while self._forwarding:
            for task in self._forwarding:
                task.cancel()
            await asyncio.gather(*self._forwarding, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._forward(reader, writer))
        self._forwarding.add(task)
        task.add_done_callback(self._forwarding.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass bytes on in both directions until either end closes."""
        there: asyncio.StreamWriter | None = None
        try:
            await self._open.wait()
            replies, there = await asyncio.open_unix_connection(self._target)
            ways = [self._pass_on(reader, there), self._pass_on(replies, writer)]
            tasks = [asyncio.create_task(way) for way in ways]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        except OSError:
            pass  # no Redis listens
        finally:
            for end in (writer, there):
                if end is not None:
                    end.transport.abort()
            await asyncio.sleep(0)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
