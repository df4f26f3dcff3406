"""Submit, list, pause, resume and cancel jobs; an acknowledged request is durable."""

import contextlib
import os
import secrets
import shutil
import time
from pathlib import Path

import msgspec
from redis.exceptions import WatchError

from tlt.base.id_types import JobId
from tlt.blobs.blob_files import committed_blobs, place_blobs
from tlt.errors import BlobError, ConfigError
from tlt.protocol.commands import CancelJob, PauseJob, ResumeJob, UserCommand
from tlt.protocol.events import AnyEvent, JobSubmitted
from tlt.protocol.refs import StartingCheckpoint
from tlt.protocol.shared_values import JobRecord
from tlt.spec.config import JobSpec, SessionSpec
from tlt.store.message_codec import Codec
from tlt.store.redis_connection import Connection
from tlt.store.redis_keys import Keys
from tlt.store.redis_stream import Stream

_events = Codec[AnyEvent](AnyEvent)
ENDED_STATUSES = frozenset({"done", "failed", "cancelled"})


def new_record(
    job: JobId,
    spec: JobSpec,
    folder: str,
    starts_from: StartingCheckpoint | None = None,
    priority: int = 0,
) -> JobRecord:
    return JobRecord(
        job=job,
        status="queued",
        error=None,
        submitted=time.time(),
        folder=folder,
        spec=spec,
        starts_from=starts_from,
        priority=priority,
    )


class Jobs:
    def __init__(self, connection: Connection, session: SessionSpec) -> None:
        self._connection = connection
        self._keys = Keys(session.name)
        self._session = session
        self._events = Stream(connection, self._keys.events, _events)

    async def submit(
        self,
        spec: JobSpec,
        starts_from: StartingCheckpoint | None = None,
        priority: int = 0,
        idempotency_key: str | None = None,
    ) -> JobRecord:
        """Queue a job; raise BlobLost if a file of the checkpoint that it starts from is gone.

        A job that asks for more workers than the session has is refused with ConfigError.
        With an `idempotency_key` that a job was submitted with, return that job.
        """
        while True:
            if (known := await self.submitted_with(idempotency_key)) is not None:
                if known.spec == spec and known.starts_from == starts_from:
                    return known
                raise ConfigError(f"the idempotency key '{idempotency_key}' is that of {known.job}")
            self._refuse_too_many_workers(spec)
            record = await self._new_folder(spec, starts_from, priority)
            if starts_from is not None:
                _copy_blobs(starts_from, Path(record.folder))
            if await self._announce(record, idempotency_key):
                return record
            _remove(Path(record.folder))

    def _refuse_too_many_workers(self, spec: JobSpec) -> None:
        asked, workers = spec.workers.asked, self._session.workers
        if asked is not None and asked > workers:
            how = f"`tlt up --workers {asked}` starts as many"
            if self._session.cluster is not None:
                how = "more hosts, or `tlt up --workers-per-host`, give it more"
            raise ConfigError(
                f"workers.count: {asked} workers are asked for, and session '{self._session.name}' "
                f"has {workers}; {how}"
            )

    async def submitted_with(self, key: str | None) -> JobRecord | None:
        """Return the job that was submitted with an idempotency key."""
        job = None if key is None else await self._connection.hget(self._keys.idempotency, key)
        return None if job is None else await self.get(JobId(job.decode()))

    async def _announce(self, record: JobRecord, key: str | None) -> bool:
        """Store a job and its event; return False if the key was taken meanwhile."""
        submitted = JobSubmitted(
            job=record.job,
            spec=record.spec,
            folder=record.folder,
            starts_from=record.starts_from,
            priority=record.priority,
        )
        async with self._connection.pipeline(transaction=True) as transaction:
            if key is not None:
                await transaction.watch(self._keys.idempotency)
                if await transaction.hexists(self._keys.idempotency, key):
                    return False
                transaction.multi()
                transaction.hset(self._keys.idempotency, key, record.job)
            transaction.hset(self._keys.jobs, record.job, msgspec.json.encode(record))
            self._events.add(transaction, submitted)
            try:
                await transaction.execute()
            except WatchError:
                return False
        return True

    async def _new_folder(
        self, spec: JobSpec, starts_from: StartingCheckpoint | None, priority: int
    ) -> JobRecord:
        """Return a record whose folder is new: sessions may share the folder of runs."""
        while True:
            number = await self._connection.incr(self._keys.job_numbers)
            record = new_record(
                JobId(f"{spec.name}-{number}"),
                spec,
                str(Path(self._session.runs) / f"{spec.name}-{number}"),
                starts_from,
                priority,
            )
            try:
                os.makedirs(record.folder)
                if self._session.blobs is not None:
                    # sessions with other folders of runs may share the store
                    own = f"{record.job}-{secrets.token_hex(4)}"
                    place_blobs(Path(record.folder), f"{self._session.blobs}/{own}")
            except FileExistsError:
                continue
            except OSError as error:
                raise ConfigError(f"{record.folder}: {error.strerror}") from error
            return record

    async def get(self, job: JobId) -> JobRecord | None:
        raw = await self._connection.hget(self._keys.jobs, job)
        return None if raw is None else msgspec.json.decode(raw, type=JobRecord)

    async def all(self) -> list[JobRecord]:
        """Return the records in the order of submission."""
        raw = await self._connection.hvals(self._keys.jobs)
        records = [msgspec.json.decode(record, type=JobRecord) for record in raw]
        return sorted(records, key=lambda record: record.submitted)

    async def readable(self) -> tuple[list[JobRecord], str | None]:
        """Return the readable records, and the error of one of the others."""
        records: list[JobRecord] = []
        complaint: str | None = None
        for name, raw in (await self._connection.hgetall(self._keys.jobs)).items():
            try:
                records.append(msgspec.json.decode(raw, type=JobRecord))
            except ValueError as error:  # msgspec's own, or text that is not UTF-8
                complaint = f"the job {name.decode(errors='replace')}: {error}"
        return sorted(records, key=lambda record: record.submitted), complaint

    async def cancel(self, job: JobId) -> None:
        await self._request(CancelJob(job=job))

    async def pause(self, job: JobId) -> JobRecord | None:
        """Ask for a job to be paused; return its record, or raise ConfigError if it has ended."""
        record = await self.get(job)
        if record is not None:
            if record.status in ENDED_STATUSES:
                raise ConfigError(f"{job} is {record.status}; a job that has ended can't be paused")
            await self._request(PauseJob(job=job))
        return record

    async def resume(self, job: JobId) -> JobRecord | None:
        """Ask for a job that a user has paused to go on; raise ConfigError if it isn't."""
        record = await self.get(job)
        if record is not None:
            if record.status != "paused":
                raise ConfigError(f"{job} is {record.status}, not paused")
            if record.pause is not None and record.pause.shortage is not None:
                raise ConfigError(
                    f"{job} goes on by itself once there is room: {record.pause.shortage}"
                )
            await self._request(ResumeJob(job=job))
        return record

    async def _request(self, command: UserCommand) -> None:
        async with self._connection.pipeline(transaction=True) as transaction:
            self._events.add(transaction, command)
            await transaction.execute()


def _copy_blobs(start: StartingCheckpoint, run: Path) -> None:
    """Commit the checkpoint for this run, too, before the other job may discard it."""
    try:
        with committed_blobs(run) as blobs, committed_blobs(Path(start.folder)) as others:
            for ref in start.blobs:
                blobs.share(ref, others)
    except BaseException:
        _remove(run)
        raise


def _remove(run: Path) -> None:
    """Remove the folder and the blobs of a job that wasn't submitted."""
    with contextlib.suppress(BlobError), committed_blobs(run) as blobs:
        blobs.discard_all_but(())
    shutil.rmtree(run, ignore_errors=True)
