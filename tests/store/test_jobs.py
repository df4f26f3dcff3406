"""Invariant: an acknowledged job is in the store, and the coordinator receives its event."""

import asyncio
import shutil
from pathlib import Path

import msgspec
import pytest

from tests.samples import SPEC
from tlt.base.id_types import JobId, PolicyVersion
from tlt.blobs.blob_files import Blobs, committed_blobs
from tlt.errors import BlobLost, ConfigError
from tlt.protocol.commands import CancelJob
from tlt.protocol.events import AnyEvent, JobSubmitted
from tlt.protocol.refs import Checkpoint, StartingCheckpoint
from tlt.spec.config import SessionSpec, WorkersSpec
from tlt.store.job_requests import Jobs
from tlt.store.message_codec import Codec
from tlt.store.redis_connection import Connection
from tlt.store.redis_keys import COORDINATOR, Keys
from tlt.store.redis_stream import Consumer, Stream

EVENTS = Codec[AnyEvent](AnyEvent)


@pytest.fixture
def jobs(connection: Connection, keys: Keys, redis_url: str, tmp_path: Path) -> Jobs:
    return _jobs(connection, keys, redis_url, tmp_path)


def _jobs(
    connection: Connection, keys: Keys, redis_url: str, runs: Path, blobs: str | None = None
) -> Jobs:
    session = SessionSpec(
        name=keys.session,
        folder=str(runs / "session"),
        runs=str(runs),
        blobs=blobs,
        flight="/flight",
        redis_url=redis_url,
    )
    return Jobs(connection, session)


async def _posted(connection: Connection, keys: Keys) -> list[AnyEvent]:
    stream = Stream(connection, keys.events, EVENTS)
    await stream.ensure_group(COORDINATOR)
    return [entry.message for entry in await Consumer(stream, COORDINATOR, "c").read(100, 1)]


async def test_records_and_posts_a_submitted_job(
    jobs: Jobs, connection: Connection, keys: Keys
) -> None:
    record = await jobs.submit(SPEC)
    assert (record.job, record.status, record.error) == ("job-1", "queued", None)
    assert (Path(record.folder).name, record.spec) == ("job-1", SPEC)
    assert await jobs.get(record.job) == record
    assert await _posted(connection, keys) == [
        JobSubmitted(job=record.job, spec=SPEC, folder=record.folder)
    ]


def _starting_checkpoint(run: Path) -> StartingCheckpoint:
    blobs = Blobs(run / "flight", run / "blobs")
    checkpoint = Checkpoint(
        version=PolicyVersion(2),
        weights=blobs.put(b"weights", commit=True),
        optimiser=blobs.put(b"optimiser", commit=True),
    )
    return StartingCheckpoint(job=JobId("other-1"), folder=str(run), checkpoint=checkpoint)


async def test_a_job_keeps_the_checkpoint_that_it_starts_from(
    jobs: Jobs, connection: Connection, keys: Keys, tmp_path: Path
) -> None:
    start = _starting_checkpoint(tmp_path / "other-1")
    record = await jobs.submit(SPEC, start)
    (event,) = await _posted(connection, keys)
    assert isinstance(event, JobSubmitted)
    assert record.starts_from == event.starts_from == start
    shutil.rmtree(start.folder)
    own = Blobs(tmp_path / "flight", Path(record.folder) / "blobs")
    assert [own.get(blob) for blob in start.blobs] == [b"weights", b"optimiser"]


async def test_a_checkpoint_that_is_gone_leaves_no_job(
    jobs: Jobs, connection: Connection, keys: Keys, tmp_path: Path
) -> None:
    start = _starting_checkpoint(tmp_path / "other-1")
    (Path(start.folder) / "blobs" / start.blobs[1].digest).unlink()
    with pytest.raises(BlobLost):
        await jobs.submit(SPEC, start)
    assert await jobs.all() == await _posted(connection, keys) == []
    assert [path.name for path in tmp_path.iterdir()] == ["other-1"]


async def test_a_job_has_a_place_of_its_own_in_the_store(
    connection: Connection, keys: Keys, redis_url: str, tmp_path: Path
) -> None:
    start = _starting_checkpoint(tmp_path / "other-1")
    names: list[str] = []
    for session in ("one", "two"):  # both number their jobs from 1
        own_keys = Keys(f"{keys.session}-{session}")
        jobs = _jobs(connection, own_keys, redis_url, tmp_path / session, f"file://{tmp_path}/b")
        record = await jobs.submit(SPEC, start)
        with committed_blobs(Path(record.folder)) as own:
            assert [own.get(blob) for blob in start.blobs] == [b"weights", b"optimiser"]
            names.append(own.committed.name)
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == sorted(names)
    assert len({*names}) == 2
    assert all(name.startswith(f"{record.job}-") for name in names)


async def test_lists_jobs_in_the_order_of_submission(jobs: Jobs) -> None:
    assert await jobs.all() == []
    named = [msgspec.structs.replace(SPEC, name=name) for name in "cab" * 4]
    records = [await jobs.submit(spec) for spec in named]
    assert await jobs.all() == records
    assert [record.job for record in records][:4] == ["c-1", "a-2", "b-3", "c-4"]


async def test_gives_concurrent_submissions_distinct_names(
    jobs: Jobs, connection: Connection, keys: Keys
) -> None:
    records = await asyncio.gather(*(jobs.submit(SPEC) for _ in range(20)))
    assert len({record.job for record in records}) == 20
    posted = await _posted(connection, keys)
    assert {event.job for event in posted if isinstance(event, JobSubmitted)} == {
        record.job for record in await jobs.all()
    }


async def test_an_idempotency_key_submits_one_job(
    jobs: Jobs, connection: Connection, keys: Keys, tmp_path: Path
) -> None:
    records = await asyncio.gather(*(jobs.submit(SPEC, idempotency_key="k") for _ in range(20)))
    assert len({record.job for record in records}) == 1
    assert await jobs.all() == records[:1]
    assert len(await _posted(connection, keys)) == 1
    assert [path.name for path in tmp_path.iterdir()] == [records[0].job]
    other = await jobs.submit(SPEC, idempotency_key="another")
    assert other.job != records[0].job
    changed = msgspec.structs.replace(SPEC, seed=SPEC.seed + 1)
    with pytest.raises(ConfigError, match=f"'k' is that of {records[0].job}"):
        await jobs.submit(changed, idempotency_key="k")
    start = _starting_checkpoint(tmp_path / "other-1")
    with pytest.raises(ConfigError, match=f"'k' is that of {records[0].job}"):
        await jobs.submit(SPEC, start, idempotency_key="k")


async def test_posts_a_cancellation_and_leaves_the_record(
    jobs: Jobs, connection: Connection, keys: Keys
) -> None:
    record = await jobs.submit(SPEC)
    await jobs.cancel(record.job)
    assert (await _posted(connection, keys))[1:] == [CancelJob(job=record.job)]
    assert await jobs.get(record.job) == record


async def test_returns_none_for_an_unknown_job(jobs: Jobs) -> None:
    assert await jobs.get(JobId("unknown-1")) is None


async def test_separates_the_jobs_of_sessions(
    jobs: Jobs, connection: Connection, tmp_path: Path
) -> None:
    other = SessionSpec(
        name="other", folder="/", runs=str(tmp_path), flight="/", redis_url="unix:///x"
    )
    await jobs.submit(SPEC)
    assert await Jobs(connection, other).all() == []


async def test_separates_the_runs_of_sessions_in_one_folder(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "job-1").mkdir()
    record = await jobs.submit(SPEC)
    assert record.job == "job-2"
    assert Path(record.folder) == tmp_path / "job-2"


async def test_refuses_a_job_that_asks_for_more_workers_than_there_are(jobs: Jobs) -> None:
    spec = msgspec.structs.replace(SPEC, workers=WorkersSpec(count=3))
    with pytest.raises(ConfigError, match=r"workers\.count: 3 workers are asked for.*has 2"):
        await jobs.submit(spec)
    assert await jobs.all() == []
