"""Invariant: an error of the connection to Redis is one line that names the URL."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.conftest import free_port
from tests.waiting import wait_until
from tlt.errors import StoreError
from tlt.store.embedded_redis import EmbeddedRedis
from tlt.store.redis_connection import (
    CONNECTION_ERRORS,
    check,
    connect,
    hide_password,
    retry_until_connected,
)


async def test_accepts_a_running_server(redis_url: str) -> None:
    async with connect(redis_url) as client:
        await check(client, redis_url)


@pytest.mark.parametrize("scheme", ["redis", "unix"])
async def test_names_a_url_where_no_server_answers(scheme: str, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}/0" if scheme == "redis" else f"{tmp_path}/none.sock"
    url = f"{scheme}://{address}"
    async with connect(url) as client:
        with pytest.raises(StoreError) as error:
            await check(client, url)
    assert str(error.value).startswith(f"no Redis answers at {url}: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:se/cr#e?t@h:1/0", "redis://:***@h:1/0"),
        ("rediss://u:a://b@c@h/0", "rediss://u:***@h/0"),
        ("redis:/:secret@h", ":***@h"),
        ("unix:///s?password=secret&db=1", "unix:///s?password=***&db=1"),
        ("rediss://h?ssl_password=secret", "rediss://h?ssl_password=***"),
        ("redis://user@h/0", "redis://user@h/0"),
        ("unix:///tmp/redis.sock", "unix:///tmp/redis.sock"),
    ],
)
def test_shows_no_url_with_a_password(url: str, shown: str) -> None:
    assert hide_password(url).endswith(shown)
    assert "secret" not in hide_password(url)


def test_a_password_that_breaks_the_url_is_not_shown() -> None:
    with pytest.raises(StoreError, match="write the characters") as error:
        connect("redis://:se/cret@h:6379/0")
    assert "cret" not in str(error.value).replace("secret", "")


@pytest.mark.parametrize("password", ["secret", "s%40c:ret"])
async def test_hides_the_password(password: str) -> None:
    url = f"redis://user:{password}@127.0.0.1:{free_port()}/0"
    async with connect(url) as client:
        with pytest.raises(StoreError, match=r"redis://user:\*\*\*@127.0.0.1:\d+/0") as error:
            await check(client, url)
    assert password not in str(error.value)


async def test_names_a_wrong_password(tcp_redis: str) -> None:
    url = tcp_redis.replace("//", "//user:secret@")
    async with connect(url) as client:
        with pytest.raises(StoreError, match=r"redis://user:\*\*\*@.*refuses the password"):
            await check(client, url)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:6379",
        "http://localhost",
        "redis://localhost:port/0",
        "redis://localhost:99999/0",
        "redis://[::1/0",
        "redis://localhost/0?socket_timeout=soon",
        "redis://localhost/0?unknown=1",
        "redis://localhost/0?protocol=9",
    ],
)
def test_names_a_malformed_url(url: str) -> None:
    with pytest.raises(StoreError) as error:
        connect(url)
    assert str(error.value).startswith(f"{url}: not a Redis URL: ")


async def test_repeats_a_persistent_call_until_the_server_is_back(short_folder: Path) -> None:
    server = EmbeddedRedis(short_folder / "data", short_folder / "redis.sock")
    server.start()
    calls = 0

    async with connect(server.url) as client:
        await client.set("key", 1)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        await wait_until(lambda: not server.running, message="the server outlived SIGKILL")
        with pytest.raises(CONNECTION_ERRORS):
            await client.get("key")

        async def increment() -> int:
            nonlocal calls
            calls += 1
            return await client.incr("key")

        call = asyncio.create_task(retry_until_connected(increment))
        await wait_until(lambda: calls >= 3, message="the call was not repeated")
        assert not call.done()
        server.start()
        assert await asyncio.wait_for(call, 20) == 2
    server.stop()


async def test_repeats_a_transaction_until_the_server_has_memory_again(tcp_redis: str) -> None:
    calls = 0

    async with connect(tcp_redis) as client:

        async def write() -> None:
            nonlocal calls
            calls += 1
            async with client.pipeline(transaction=True) as transaction:
                transaction.set("memory", calls)
                await transaction.execute()

        await client.config_set("maxmemory", 1)
        try:
            call = asyncio.create_task(retry_until_connected(write))
            await wait_until(lambda: calls >= 3, message="the transaction was not repeated")
            assert not call.done()
        finally:
            await client.config_set("maxmemory", 0)
        await asyncio.wait_for(call, 20)
        assert int(await client.get("memory")) == calls


async def test_passes_other_errors_of_a_persistent_call_on() -> None:
    async def refuse() -> None:
        raise StoreError("no")

    with pytest.raises(StoreError, match="no"):
        await retry_until_connected(refuse)
