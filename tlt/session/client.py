"""Read a session's jobs and workers, over Redis alone."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import redis.exceptions

from tlt.base.id_types import JobId, WorkerId
from tlt.errors import ConfigError, NoSession, StoreError
from tlt.protocol.shared_values import Heartbeat, JobRecord, ServiceHeartbeat
from tlt.session.control import find_session
from tlt.spec.config import SessionSpec
from tlt.store.heartbeats import read_heartbeats, read_services
from tlt.store.job_requests import Jobs
from tlt.store.journal import FILE_NAME
from tlt.store.redis_connection import (
    CONNECTION_ERRORS,
    Connection,
    WritesRefused,
    connect,
    hide_password,
)
from tlt.store.redis_keys import Keys
from tlt.store.redis_memory import RedisMemory, read_memory

_PATIENCE_SECONDS, _RESTART_SECONDS = 5.0, 30.0
_POLL_SECONDS = 0.2
_Result = TypeVar("_Result")


class Client:
    def __init__(self, session: SessionSpec, connection: Connection) -> None:
        self.session = session
        self.jobs = Jobs(connection, session)
        self._connection = connection
        self._keys = Keys(session.name)

    async def job(self, name: str) -> JobRecord:
        record = await self.jobs.get(JobId(name))
        if record is None:
            known = ", ".join(record.job for record in await self.jobs.all()) or "none"
            raise ConfigError(f"there is no job '{name}'; there are: {known}")
        return record

    async def services(self) -> dict[str, ServiceHeartbeat]:
        return await read_services(self._connection, self._keys)

    async def memory(self) -> RedisMemory:
        return await read_memory(self._connection)

    async def workers(self) -> dict[WorkerId, Heartbeat]:
        return await read_heartbeats(self._connection, self._keys)


async def _await_answer(connection: Connection) -> None:
    """Wait for a Redis that is being restarted, which reads its file first."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            await connection.ping()
            return
        except WritesRefused:  # a ping too, where the disk is full; it can be read
            return
        except CONNECTION_ERRORS:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)


def with_client(session: str, use: Callable[[Client], Awaitable[_Result]]) -> _Result:
    """Run `use` with a client; raise StoreError if the session's Redis does not answer."""
    spec = find_session(session)

    async def run() -> _Result:
        connection = connect(spec.redis_url, seconds=_PATIENCE_SECONDS)
        try:
            await _await_answer(connection)
            return await use(Client(spec, connection))
        except WritesRefused as error:
            raise StoreError(
                f"the Redis at {hide_password(spec.redis_url)} refuses writes: {error}"
            ) from error
        except (*CONNECTION_ERRORS, redis.exceptions.RedisError) as error:
            raise StoreError(
                f"no Redis answers at {hide_password(spec.redis_url)}: {error}"
            ) from error
        finally:
            await connection.aclose()

    return _run(run)


def _run(work: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
    """Run a coroutine to its end, beside a loop if one runs already: in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work())
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(lambda: asyncio.run(work())).result()


def fetch_record(session: str, job: str) -> JobRecord:
    """Return a job's record, and wait for a Redis that is being restarted."""
    deadline = time.monotonic() + _RESTART_SECONDS
    while True:
        try:
            return with_client(session, lambda client: client.job(job))
        except StoreError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_SECONDS)


def run_folder(job: str, session: str) -> Path:
    """Return the folder of a job of the session, or `job` itself if it is a run's folder."""
    if (Path(job) / FILE_NAME).exists():
        return Path(job).resolve()

    async def find(client: Client) -> Path:
        """Find jobs of earlier sessions too, which have left no record."""
        earlier = Path(client.session.runs) / job
        known = await client.jobs.get(JobId(job))
        if known is None and (earlier / FILE_NAME).exists():
            return earlier
        return Path((await client.job(job)).folder)

    try:
        return with_client(session, find)
    except NoSession as error:
        raise NoSession(f"{error}; or name a run's folder instead of {job}") from error
