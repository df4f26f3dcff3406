"""Submit, list and cancel jobs; an acknowledged request is durable."""

import os
import shutil
import time
from pathlib import Path

import msgspec

from tlt.blobs import Blobs
from tlt.config import JobSpec, SessionSpec
from tlt.errors import ConfigError
from tlt.id_types import JobId
from tlt.protocol.events import AnyEvent, JobCancelRequested, JobSubmitted
from tlt.protocol.refs import StartingCheckpoint
from tlt.protocol.shared_values import JobRecord
from tlt.store.message_codec import Codec
from tlt.store.redis_connection import Connection
from tlt.store.redis_keys import Keys
from tlt.store.redis_stream import Stream

_events = Codec[AnyEvent](AnyEvent)
ENDED_STATUSES = frozenset({"done", "failed", "cancelled"})


def new_record(
    job: JobId, spec: JobSpec, folder: str, starts_from: StartingCheckpoint | None = None
) -> JobRecord:
    return JobRecord(
        job=job,
        status="queued",
        error=None,
        submitted=time.time(),
        folder=folder,
        spec=spec,
        starts_from=starts_from,
    )


class Jobs:
    def __init__(self, connection: Connection, session: SessionSpec) -> None:
        self._connection = connection
        self._keys = Keys(session.name)
        self._runs = session.runs
        self._events = Stream(connection, self._keys.events, _events)

    async def submit(
        self, spec: JobSpec, starts_from: StartingCheckpoint | None = None
    ) -> JobRecord:
        """Queue a job; raise BlobLost if a file of the checkpoint that it starts from is gone."""
        record = await self._new_folder(spec, starts_from)
        if starts_from is not None:
            _copy_blobs(starts_from, Path(record.folder))
        submitted = JobSubmitted(
            job=record.job, spec=spec, folder=record.folder, starts_from=starts_from
        )
        async with self._connection.pipeline(transaction=True) as transaction:
            transaction.hset(self._keys.jobs, record.job, msgspec.json.encode(record))
            self._events.add(transaction, submitted)
            await transaction.execute()
        return record

    async def _new_folder(self, spec: JobSpec, starts_from: StartingCheckpoint | None) -> JobRecord:
        """Return a record whose folder is new: sessions may share the folder of runs."""
        while True:
            number = await self._connection.incr(self._keys.job_numbers)
            record = new_record(
                JobId(f"{spec.name}-{number}"),
                spec,
                str(Path(self._runs) / f"{spec.name}-{number}"),
                starts_from,
            )
            try:
                os.makedirs(record.folder)
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
        async with self._connection.pipeline(transaction=True) as transaction:
            self._events.add(transaction, JobCancelRequested(job=job))
            await transaction.execute()


def _copy_blobs(start: StartingCheckpoint, run: Path) -> None:
    """Put the checkpoint into the run's folder, before the other job may discard it."""
    blobs = Blobs(run / "blobs", run / "blobs")
    try:
        for ref in start.blobs:
            blobs.share(ref, Path(start.folder) / "blobs")
    except BaseException:
        shutil.rmtree(run, ignore_errors=True)
        raise
