"""Start Ray's head again when a part of it has ended, until all actors are back."""

import asyncio
import time
from collections.abc import Sequence

import redis.exceptions

from tlt.actors.backoff import pause_after
from tlt.actors.supervisor.ray_head import RayHead
from tlt.errors import TltError
from tlt.session.fault_log import Fault, FaultLog
from tlt.session.session_process_states import actor_names
from tlt.spec.config import SessionSpec
from tlt.store.heartbeats import SERVICES, forget_heartbeats, read_heartbeats, read_services
from tlt.store.redis_connection import CONNECTION_ERRORS, connect
from tlt.store.redis_keys import Keys

START_SECONDS = 180.0
# for one reply; the supervisor does nothing else meanwhile
_REDIS_SECONDS = 5.0
_REDIS_ERRORS = (*CONNECTION_ERRORS, redis.exceptions.RedisError)


class RayHealer:
    """A fault is healed in steps, so that Redis can be restarted between them."""

    def __init__(self, head: RayHead, spec: SessionSpec, faults: FaultLog) -> None:
        self._head = head
        self._spec = spec
        self._faults = faults
        self._fault: Fault | None = None
        # when the head was started, and when it is started again; None: it is not due
        self._started = 0.0
        self._due: float | None = None

    def check(self, now: float) -> None:
        """Take the next step; call it regularly."""
        if self._due is None:
            self._find_fault(now)
        if self._fault is None:
            return
        if self._due is None:
            if is_at_work(self._spec):
                self._faults.record_recovery(self._fault, time.time())
                self._fault = None
        elif now >= self._due and forget_actors(self._spec):
            self._start(now)

    def _find_fault(self, now: float) -> None:
        ended = self._head.ended()
        if self._fault is None:
            if ended is not None:
                self._fault = self._faults.record_fault(ended, time.time())
                self._due = now
        elif ended is not None:
            self._retry(f"{ended} ended: {self._head.complaint()}", now)
        elif now - self._started > START_SECONDS:
            self._retry(describe_missing(missing_actors(self._spec)), now)

    def _start(self, now: float) -> None:
        assert self._fault is not None
        self._fault = self._faults.record_retry(self._fault)
        self._started, self._due = now, None
        try:
            self._head.start()
        except (TltError, OSError) as error:
            self._retry(str(error), now)

    def _retry(self, error: str, now: float) -> None:
        assert self._fault is not None
        self._fault = self._faults.record_failure(self._fault, error)
        self._due = now + pause_after(self._fault.tries, 1.0)


def missing_actors(spec: SessionSpec) -> list[str]:
    """Name the actors that have sent no heartbeat yet, and the workers without ranks."""

    async def read() -> list[str]:
        connection, keys = connect(spec.redis_url, _REDIS_SECONDS), Keys(spec.name)
        try:
            services = await read_services(connection, keys)
            workers = await read_heartbeats(connection, keys)
        finally:
            await connection.aclose()
        up = {*services, *(worker for worker, beat in workers.items() if beat.rank_pids)}
        return [name for name in actor_names(spec) if name not in up]

    try:
        return asyncio.run(read())
    except _REDIS_ERRORS:
        return actor_names(spec)


def is_at_work(spec: SessionSpec) -> bool:
    """Return True if all actors are up, or, in a cluster that may have lost hosts, a worker."""
    missing = missing_actors(spec)
    if spec.cluster is None:
        return not missing
    return not set(missing) & set(SERVICES) and len(missing) < spec.workers


def describe_missing(names: Sequence[str]) -> str:
    return f"{', '.join(names)} did not come up within {START_SECONDS:.0f} s"


def forget_actors(spec: SessionSpec) -> bool:
    """Delete the heartbeats of actors that have ended; return False if Redis does not answer."""

    async def forget() -> None:
        connection = connect(spec.redis_url, _REDIS_SECONDS)
        try:
            await forget_heartbeats(connection, Keys(spec.name))
        finally:
            await connection.aclose()

    try:
        asyncio.run(forget())
    except _REDIS_ERRORS:
        return False
    return True
