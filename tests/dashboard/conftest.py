"""Fixtures that serve the dashboard of a run's folder or of a session over HTTP."""

import asyncio
import fcntl
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn

from tests.dashboard.runs import some_run, write_run
from tlt.dashboard.app import Dashboard
from tlt.dashboard.data_sources import FolderSource, SessionSource, Source
from tlt.spec.config import SessionSpec
from tlt.store.redis_connection import Connection
from tlt.store.redis_keys import Keys

TOKEN = "the-token"
OURS = {"x-tlt": "1", "authorization": f"Bearer {TOKEN}"}

Serve = Callable[..., Awaitable[httpx.AsyncClient]]


@asynccontextmanager
async def _served(
    source: Source, loopback: bool, public: str | None
) -> AsyncIterator[httpx.AsyncClient]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        dashboard = Dashboard(source, token=TOKEN, port=port, loopback=loopback, public=public)
        config = uvicorn.Config(
            dashboard.app, http="h11", ws="none", log_level="critical", timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            yield client
        server.should_exit = True
        await running


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    async with AsyncExitStack() as stack:

        async def start(
            source: Source, *, loopback: bool = True, public: str | None = None
        ) -> httpx.AsyncClient:
            return await stack.enter_async_context(_served(source, loopback, public))

        yield start


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return write_run(some_run(3), tmp_path)


@pytest.fixture
async def folder_client(serve: Serve, run_folder: Path) -> httpx.AsyncClient:
    return await serve(FolderSource(run_folder))


@pytest.fixture
def session(keys: Keys, redis_url: str, tmp_path: Path) -> Iterator[SessionSpec]:
    """Yield a session that is up: its lock is held."""
    folder = tmp_path / "session"
    folder.mkdir()
    with open(folder / "lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield _session(keys, redis_url, folder)


def _session(keys: Keys, redis_url: str, folder: Path) -> SessionSpec:
    return SessionSpec(
        name=keys.session,
        folder=str(folder),
        runs=str(folder.with_name("runs")),
        flight="/flight",
        redis_url=redis_url,
    )


@pytest.fixture
async def session_client(
    serve: Serve, session: SessionSpec, connection: Connection
) -> httpx.AsyncClient:
    return await serve(SessionSource(session))
