"""The connection to Redis: its errors, time-outs and retries are handled here only."""

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

import redis.exceptions
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.connection import HiredisRespSerializer

from tlt.errors import StoreError

# redis-py annotates every reply as a union over options that the checker cannot see.
Connection = Any
Transaction = Any


class WritesRefused(redis.exceptions.ResponseError):
    """Redis has no memory left for a write (maxmemory), or can't write its file."""


# what a retry outlasts
CONNECTION_ERRORS = (
    WritesRefused,
    redis.exceptions.ConnectionError,
    redis.exceptions.TimeoutError,
    # redis-py raises it when a connection that watches a key is lost
    redis.exceptions.WatchError,
    # the server refuses what takes memory until it has some again
    redis.exceptions.OutOfMemoryError,
    ConnectionError,
    TimeoutError,
)
_Result = TypeVar("_Result")


class _Refusals:
    """Turn refused writes into WritesRefused, and remember the last one."""

    def __init__(self) -> None:
        self.last: float | None = None

    @contextlib.contextmanager
    def noted(self) -> Generator[None]:
        try:
            yield
        except redis.exceptions.ResponseError as error:
            # a transaction that memory ends names the cause in its text only
            full = isinstance(error, redis.exceptions.OutOfMemoryError) or "OOM " in str(error)
            if not full and "MISCONF" not in str(error):
                raise
            self.last = time.monotonic()
            raise WritesRefused(str(error)) from error


class _Pipeline(Pipeline):
    refusals: _Refusals

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        with self.refusals.noted():
            return await super().execute(raise_on_error)


class _PackInC:
    """Packs commands in C, as redis-py does where connections aren't asynchronous."""

    pack_command = HiredisRespSerializer.pack


class _Client(Redis):
    def __init__(self, *args: Any, **options: Any) -> None:
        """Redis makes further clients of this class itself."""
        super().__init__(*args, **options)
        self.refusals = _Refusals()

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        with self.refusals.noted():
            return await super().execute_command(*args, **options)

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> _Pipeline:
        made = _Pipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)
        made.refusals = self.refusals
        return made


def refused_writes(connection: Connection, seconds: float) -> bool:
    """Return True if Redis has refused a write of this connection in the last so many seconds."""
    last: float | None = connection.refusals.last
    return last is not None and time.monotonic() - last < seconds


def connect(url: str, seconds: float = 30.0) -> Connection:
    """Return a client whose calls fail at once; `retry_until_connected` outlasts a restart.

    redis-py's default socket time-out of five seconds breaks longer blocking reads.
    """
    try:
        client = _Client.from_url(
            url,
            socket_timeout=seconds,
            socket_connect_timeout=5,
            retry=Retry(ExponentialBackoff(cap=0.1, base=0.01), 0),
        )
        pool = client.connection_pool
        pool.connection_class = type("Connection", (_PackInC, pool.connection_class), {})
        pool.make_connection()  # an unknown option shows only here
    except (ValueError, TypeError, redis.exceptions.RedisError) as error:
        why = str(error)
        if isinstance(error, ValueError) and "@" in url:  # it may name a part of the password
            why = "write the characters /?#@ of its password as %2F %3F %23 %40"
        raise StoreError(f"{hide_password(url)}: not a Redis URL: {why}") from error
    return client


async def check(connection: Connection, url: str) -> None:
    """Raise one clear StoreError if no Redis answers or its version is too old."""
    try:
        await connection.ping()
        info: dict[str, Any] = await connection.info("server")
    except redis.exceptions.AuthenticationError as error:
        raise StoreError(f"the Redis at {hide_password(url)} refuses the password") from error
    except (*CONNECTION_ERRORS, redis.exceptions.RedisError) as error:
        raise StoreError(f"no Redis answers at {hide_password(url)}: {error}") from error
    version = str(info["redis_version"])
    if tuple(map(int, version.split(".")[:2])) < (6, 2):
        raise StoreError(f"the Redis at {hide_password(url)} is {version}; 6.2 or newer is needed")


async def retry_until_connected(call: Callable[[], Awaitable[_Result]]) -> _Result:
    """Repeat an idempotent call until Redis is back."""
    delay = 0.05
    while True:
        try:
            return await call()
        except CONNECTION_ERRORS:
            await asyncio.sleep(delay)
            delay = min(delay * 2, 1.0)


def hide_password(url: str) -> str:
    """Return the URL without its passwords, malformed or not, for errors that end up in logs."""
    scheme, mark, place = url.partition("://")
    if not mark:
        scheme, place = "", url
    credentials, at, host = place.rpartition("@")
    if ":" in credentials:
        place = f"{credentials.partition(':')[0]}:***{at}{host}"
    return re.sub(r"(password=)[^&]*", r"\1***", f"{scheme}{mark}{place}")
