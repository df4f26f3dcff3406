"""Fixtures of two real Redis servers, since code must work with either of them."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.simulation.walk import corpus
from tests.simulation.world import World
from tlt.store.embedded_redis import EmbeddedRedis, find_binary
from tlt.store.redis_connection import Connection, connect
from tlt.store.redis_keys import Keys

pytest_plugins = ["tests.session"]

# Ranks do the same: two threads would wait for each other while another process has a core.
torch.set_num_threads(1)

# what lands depends neither on speed nor on chance; HYPOTHESIS_PROFILE=random runs many more
# examples, with another seed each time
_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "fixed",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=100,
    suppress_health_check=_SLOW,
)
settings.register_profile(
    "random", deadline=None, max_examples=5000, suppress_health_check=_SLOW, print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@pytest.fixture(scope="session")
def walks() -> dict[int, World]:
    """Return finished random walks by their seeds; tests only read them."""
    return corpus()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Return a folder whose path is short enough for a socket, unlike some of tmp_path."""
    folder = Path(tempfile.mkdtemp(prefix="tlt-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def embedded_redis() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="tlt-", dir="/tmp") as folder:
        server = EmbeddedRedis(Path(folder) / "data", Path(folder) / "redis.sock")
        server.start()
        yield server.url
        server.stop()


@pytest.fixture(scope="session")
def tcp_redis() -> Iterator[str]:
    """Start a server that TLT doesn't own, named by its URL."""
    port = free_port()
    server = subprocess.Popen(
        [str(find_binary()), "--port", str(port), "--bind", "127.0.0.1", "--save", ""],
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 20
    while not _listens(port):
        assert time.monotonic() < deadline, "the redis-server does not listen"
        assert server.poll() is None, "the redis-server ended"
        time.sleep(0.005)
    yield f"redis://127.0.0.1:{port}/0"
    server.terminate()
    server.wait()


@pytest.fixture(scope="session", params=["embedded", "url"])
def redis_url(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(f"{'tcp' if request.param == 'url' else 'embedded'}_redis")


@pytest.fixture
def keys() -> Keys:
    return Keys(f"test-{uuid.uuid4().hex[:12]}")


@pytest.fixture
async def connection(redis_url: str) -> AsyncIterator[Connection]:
    client = connect(redis_url)
    yield client
    await client.aclose()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
