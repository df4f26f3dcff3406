"""Invariant: what a user was told about a job is in the store, and the coordinator hears of it."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from tests.samples import SPEC
from tlt.config import SessionSpec
from tlt.ids import JobId
from tlt.protocol.events import AnyEvent, JobCancelRequested, JobSubmitted
from tlt.store.job_records import Jobs
from tlt.store.message_codec import Codec
from tlt.store.redis_connection import Connection
from tlt.store.redis_keys import COORDINATOR, Keys
from tlt.store.redis_stream import Consumer, Stream

EVENTS = Codec[AnyEvent](AnyEvent)


@pytest.fixture
def jobs(connection: Connection, keys: Keys, redis_url: str, tmp_path: Path) -> Jobs:
    session = SessionSpec(
        name=keys.session,
        folder=str(tmp_path / "session"),
        runs=str(tmp_path),
        flight="/flight",
        redis_url=redis_url,
    )
    return Jobs(connection, session)


async def _heard(connection: Connection, keys: Keys) -> list[AnyEvent]:
    stream = Stream(connection, keys.events, EVENTS)
    await stream.ensure_group(COORDINATOR)
    return [entry.message for entry in await Consumer(stream, COORDINATOR, "c").read(100, 1)]


async def test_submitted_job_is_recorded_and_announced(
    jobs: Jobs, connection: Connection, keys: Keys
) -> None:
    record = await jobs.submit(SPEC)
    assert (record.job, record.status, record.error) == ("job-1", "queued", None)
    assert (Path(record.folder).name, record.spec) == ("job-1", SPEC)
    assert await jobs.get(record.job) == record
    assert await _heard(connection, keys) == [
        JobSubmitted(job=record.job, spec=SPEC, folder=record.folder)
    ]


async def test_jobs_are_listed_in_the_order_of_submission(jobs: Jobs) -> None:
    assert await jobs.all() == []
    named = [msgspec.structs.replace(SPEC, name=name) for name in "cab" * 4]
    records = [await jobs.submit(spec) for spec in named]
    assert await jobs.all() == records
    assert [record.job for record in records][:4] == ["c-1", "a-2", "b-3", "c-4"]


async def test_jobs_submitted_at_once_have_names_of_their_own(
    jobs: Jobs, connection: Connection, keys: Keys
) -> None:
    records = await asyncio.gather(*(jobs.submit(SPEC) for _ in range(20)))
    assert len({record.job for record in records}) == 20
    heard = await _heard(connection, keys)
    assert {event.job for event in heard if isinstance(event, JobSubmitted)} == {
        record.job for record in await jobs.all()
    }


async def test_cancelling_is_a_request(jobs: Jobs, connection: Connection, keys: Keys) -> None:
    record = await jobs.submit(SPEC)
    await jobs.cancel(record.job)
    assert (await _heard(connection, keys))[1:] == [JobCancelRequested(job=record.job)]
    assert await jobs.get(record.job) == record


async def test_unknown_job_is_none(jobs: Jobs) -> None:
    assert await jobs.get(JobId("nobody-1")) is None


async def test_sessions_do_not_see_each_other(
    jobs: Jobs, connection: Connection, tmp_path: Path
) -> None:
    other = SessionSpec(
        name="other", folder="/", runs=str(tmp_path), flight="/", redis_url="unix:///x"
    )
    await jobs.submit(SPEC)
    assert await Jobs(connection, other).all() == []


async def test_sessions_that_share_a_folder_of_runs_share_no_run(
    jobs: Jobs, tmp_path: Path
) -> None:
    (tmp_path / "job-1").mkdir()
    record = await jobs.submit(SPEC)
    assert record.job == "job-2"
    assert Path(record.folder) == tmp_path / "job-2"
