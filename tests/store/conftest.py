"""Fixtures of a stream of prompts in a session of its own, and of a proxy that loses a reply."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.samples import JOB
from tlt.protocol.commands import PromptIssued
from tlt.store.message_codec import Codec
from tlt.store.redis_connection import Connection
from tlt.store.redis_keys import ROLLOUT, Keys
from tlt.store.redis_stream import Stream

CODEC = Codec[PromptIssued](PromptIssued)


@pytest.fixture
async def stream(connection: Connection, keys: Keys) -> Stream[PromptIssued]:
    stream = Stream(connection, keys.prompts(JOB), CODEC)
    await stream.ensure_group(ROLLOUT)
    return stream


class Proxy:
    """Forward bytes; once `swallowing` is set, a connection loses its next reply and all others.

    A reply may arrive in several pieces, of which none must pass.
    """

    def __init__(self, redis_url: str, path: Path) -> None:
        self._upstream = urlsplit(redis_url)
        self._path = path
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = f"unix://{path}"
        self.swallowing = False
        self.swallowed = asyncio.Event()

    async def serve(self) -> asyncio.Server:
        return await asyncio.start_unix_server(self._connected, str(self._path))

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._upstream.scheme == "unix":
            redis = await asyncio.open_unix_connection(self._upstream.path)
        else:
            redis = await asyncio.open_connection(self._upstream.hostname, self._upstream.port)
        requests = asyncio.create_task(self._forward(reader, redis[1], replies=False))
        self._tasks.add(requests)
        await self._forward(redis[0], writer, replies=True)
        await requests
        self._tasks.discard(requests)

    async def _forward(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, replies: bool
    ) -> None:
        lost = False
        while data := await source.read(65536):
            if replies and self.swallowing:
                self.swallowing, lost = False, True
                self.swallowed.set()
            if not lost:
                sink.write(data)
        sink.close()
        await sink.wait_closed()


@pytest.fixture
async def proxy(redis_url: str, short_folder: Path) -> AsyncIterator[Proxy]:
    proxy = Proxy(redis_url, short_folder / "proxy.sock")
    server = await proxy.serve()
    yield proxy
    server.close()
