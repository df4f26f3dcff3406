"""Remove what a session no longer needs: read entries, and what ended jobs and workers have left.

A rank that is killed or slow may write after the end of its job, and a worker that is killed
deletes nothing.
"""

import contextlib
import shutil
from collections.abc import Collection
from pathlib import Path

import redis.exceptions

from tlt.actors.coordinator.redis_effects import Effects
from tlt.base.id_types import JobId
from tlt.base.log_rotation import bound_logs
from tlt.spec.config import HIDDEN_STATES, SessionSpec
from tlt.store.job_requests import ENDED_STATUSES
from tlt.store.worker_fence import delete_commands_of_ended, read_fences


class PeriodicCleanup:
    def __init__(self, spec: SessionSpec, effects: Effects) -> None:
        self._spec = spec
        self._effects = effects
        # those at which commands were last deleted
        self._fences: dict[bytes, bytes] | None = None

    async def run(self, jobs: Collection[JobId]) -> None:
        """Clean up once; `jobs` are those with an open run, whose end isn't committed yet."""
        self._remove_shared_memory(jobs)
        for job in jobs:
            bound_logs(Path(self._effects.records[job].folder) / "logs")
            for engine in self._spec.job_flight(job).glob("sglang-*"):
                bound_logs(engine)
        await self._effects.events.trim()
        for job in jobs:
            for stream in self._effects.prompt_streams(job):
                with contextlib.suppress(redis.exceptions.ResponseError):
                    await stream.trim()
        await self._delete_commands()

    async def _delete_commands(self) -> None:
        """Look through all keys, but only after a fence has moved."""
        connection, keys = self._effects.connection, self._effects.keys
        fences = await read_fences(connection, keys)
        if fences != self._fences:
            await delete_commands_of_ended(connection, keys, fences)
            self._fences = fences

    def _remove_shared_memory(self, jobs: Collection[JobId]) -> None:
        with contextlib.suppress(OSError):
            for place in Path(self._spec.flight).iterdir():
                record = self._effects.records.get(JobId(place.name))
                if (
                    place.name not in jobs
                    and record is not None
                    and record.status in ENDED_STATUSES
                ):
                    shutil.rmtree(place, ignore_errors=True)
                elif record is not None and record.status == "paused":
                    # a coordinator that died may not have
                    shutil.rmtree(place / HIDDEN_STATES, ignore_errors=True)
