"""Pause jobs that run out of room, and let them go on when there is room again.

It looks before a job starts and every few seconds while it runs, and posts the same events as
`tlt pause` and `tlt resume`. Of several jobs the one that was submitted last is paused first.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from tlt.actors.coordinator.deciders import Deciders
from tlt.actors.coordinator.redis_effects import Effects
from tlt.base.id_types import JobId
from tlt.blobs.blob_files import free_bytes
from tlt.errors import BlobError, StoreUnreachable, find_remedy
from tlt.policies.run.run_state import Phase
from tlt.policies.session.room import (
    SPARE,
    Need,
    PolicySize,
    answer_bytes,
    checkpoint_bytes,
    find_shortage,
    redis_bytes,
    reserve,
    shared_memory_bytes,
)
from tlt.policies.session.session_state import Job
from tlt.protocol.commands import PauseJob, ResumeJob
from tlt.protocol.shared_values import Prepared
from tlt.spec.config import JobSpec, SessionSpec
from tlt.store.redis_connection import CONNECTION_ERRORS
from tlt.store.redis_memory import read_memory

_LOOK_SECONDS = 3.0
# a quota may refuse what the disk has free, so a job isn't resumed at once
_LEAST_PAUSE_SECONDS = 10.0


class RoomWatch:
    def __init__(
        self,
        spec: SessionSpec,
        effects: Effects,
        deciders: Deciders,
        free: Callable[[Path], int] = free_bytes,
    ) -> None:
        self._spec = spec
        self._effects = effects
        self._deciders = deciders
        self._free = free
        # of jobs that were paused before they started
        self._prepared: dict[JobId, PolicySize] = {}

    async def run(self) -> None:
        while True:
            with contextlib.suppress(*CONNECTION_ERRORS, BlobError, OSError):
                await self.look(time.time())
            await asyncio.sleep(_LOOK_SECONDS)

    async def look_before_start(
        self, job: JobId, spec: JobSpec, prepared: Prepared | None
    ) -> PauseJob | None:
        """Return the pause of a job that has no room to start, or even to be prepared."""
        policy = self._prepared[job] = _size(self._spec.device, spec, prepared)
        try:
            needs = await self._needs(job, spec, policy)
            shortage = find_shortage(reserve(needs, await self._needs_of_others(job)))
            shortage = shortage or await self._complain_of_store(job)
        except (*CONNECTION_ERRORS, OSError, BlobError):
            return None
        return None if shortage is None else PauseJob(job=job, shortage=shortage)

    async def look(self, now: float) -> None:
        for job, entry in list(self._deciders.session.state.jobs.items()):
            # what one job's folder or store refuses holds up no other job
            with contextlib.suppress(OSError, BlobError):
                await self._look_at(job, entry, now)

    async def _look_at(self, job: JobId, entry: Job, now: float) -> None:
        runs = _runs(entry)
        if not (runs and self._is_decoding(job)) and not _may_resume(entry, now):
            return
        needs = reserve(await self._needs_of(job, entry), await self._needs_of_others(job))
        shortage = find_shortage(needs, 1.0 if runs else SPARE)
        if not runs and shortage is None:
            shortage = await self._complain_of_store(job)
        if runs and shortage is not None:
            await self._effects.post(PauseJob(job=job, shortage=shortage))
        elif not runs and shortage is None:
            await self._effects.post(ResumeJob(job=job, by_session=True))

    async def _complain_of_store(self, job: JobId) -> str | None:
        try:
            await asyncio.to_thread(self._deciders.runs.blobs(job).check_place)
        except StoreUnreachable as error:
            return f"{error}. {find_remedy(error)}"
        return None

    def _is_decoding(self, job: JobId) -> bool:
        """Return False while a policy is written, which takes the room that it needs."""
        run = self._deciders.runs.states.get(job)
        return run is not None and run.state.phase is not Phase.POLICY_UPDATE

    async def _needs_of_others(self, job: JobId) -> list[list[Need]]:
        """Return the needs of running jobs: of the earlier ones, if this job runs, too.

        A job that is to start waits for the room of the next policy of others that publish one.
        """
        needs: list[list[Need]] = []
        jobs = dict(self._deciders.session.state.jobs)
        starts = job not in jobs or not _runs(jobs[job])
        for other, entry in jobs.items():
            if other == job and not starts:
                break
            if other != job and _runs(entry) and (starts or self._is_decoding(other)):
                needs.append(await self._needs_of(other, entry))
        return needs

    async def _needs_of(self, job: JobId, entry: Job) -> list[Need]:
        policy = _size(self._spec.device, entry.spec, entry.prepared)
        if not entry.started:
            policy = self._prepared.get(job, policy)
        return await self._needs(job, entry.spec, policy)

    async def _needs(self, job: JobId, spec: JobSpec, policy: PolicySize) -> list[Need]:
        run = self._deciders.runs.states.get(job)
        last = None if run is None else run.state.policy.checkpoint
        folder, flight = self._deciders.runs.folder(job), Path(self._spec.flight)
        memory = await read_memory(self._effects.connection)
        answers = answer_bytes(spec)
        checkpoint = checkpoint_bytes(spec, policy, last)
        policies = shared_memory_bytes(spec, policy, started=run is not None)
        place = self._deciders.runs.blobs(job).committed
        disks = [
            self._disk(
                "runs", folder, answers + checkpoint, "a checkpoint and the answers of a step need"
            )
        ]
        if place.parent != folder:
            disks = [self._disk("runs", folder, answers, "the answers of a step need")]
            if place == self._spec.job_flight(job):
                policies += checkpoint  # on its way to a store
            else:
                disks.append(self._disk("blobs", place, checkpoint, "a checkpoint needs"))
        return [
            *disks,
            Need(
                kind="shared memory",
                place=str(flight),
                free=self._free_bytes(flight),
                bytes=policies,
                what="the next policies need",
                remedy="Free or enlarge this shared memory",
            ),
            Need(
                kind="Redis",
                place="Redis",
                free=memory.free,
                bytes=redis_bytes(spec),
                what="the prompts and answers of a step need",
                remedy="Raise its maxmemory or free memory there",
            ),
        ]

    def _disk(self, kind: str, folder: Path, needed: int, what: str) -> Need:
        return Need(
            kind=kind,
            place=str(folder),
            free=self._free_bytes(folder),
            bytes=needed,
            what=what,
            remedy="Free space there",
        )

    def _free_bytes(self, folder: Path) -> int:
        """Return the free space of the folder, or of the nearest one above it that exists."""
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        return self._free(folder)


def _size(device: str, spec: JobSpec, prepared: Prepared | None) -> PolicySize:
    weights, trained = 0, 0
    if prepared is not None:
        weights, trained = prepared.policy_weights, prepared.trained_weights
    half = spec.policy.dtype == "bfloat16"
    half |= spec.policy.dtype == "auto" and device == "cuda"
    return PolicySize(weights=weights, trained=trained, width=2 if half else 4)


def _runs(entry: Job) -> bool:
    return entry.status == "running" and entry.pause is None


def _may_resume(entry: Job, now: float) -> bool:
    pause = entry.pause
    if entry.status != "paused" or pause is None or pause.shortage is None:
        return False
    # where the clock was set back, the pause began in the future
    return not 0 <= now - pause.since < _LEAST_PAUSE_SECONDS
