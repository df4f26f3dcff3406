"""A session that ends during a job resumes the job when it is up again, on fewer workers, too."""

import shutil
from pathlib import Path

import pytest

from tests.local_session.session import changed, local_session, rewards
from tlt.protocol.events import SessionResumed
from tlt.spec.config import JobSpec
from tlt.store.embedded_redis import EmbeddedRedis

STEPS = 4


@pytest.mark.parametrize("shards", [1, "all"])
@pytest.mark.parametrize("memory", ["kept", "lost"])
async def test_resumes_a_job_after_its_session_ended(
    short_folder: Path, own_redis: EmbeddedRedis, spec: JobSpec, memory: str, shards: int | str
) -> None:
    """It ends after a checkpoint and one more update that no checkpoint holds."""
    spec = changed(spec, algorithm={"steps": STEPS, "checkpoint_every": 2, "shards": shards})
    async with local_session(short_folder, own_redis, ranks_per_worker=2) as session:
        expected = await session.undisturbed(spec)
        with session.gates.hold("train-3-answered"):
            job = await session.submit(spec)
            await session.arrived("train-3-answered")
            await session.end()
    own_redis.stop()
    if memory == "lost":
        shutil.rmtree(session.spec.flight)
    own_redis.start()
    async with local_session(short_folder, own_redis, workers=1, new=False) as session:
        await session.assert_unharmed(job, expected)
        snapshot = session.fold(job)
        assert snapshot.losses == 0
        resumed = session.events(job, SessionResumed)
        assert [event.blobs_kept for event in resumed] == [memory == "kept"]


async def test_jobs_that_waited_run_after_the_session_ended(
    short_folder: Path, own_redis: EmbeddedRedis, spec: JobSpec
) -> None:
    async with local_session(short_folder, own_redis) as session:
        with session.gates.hold("train-0"):
            jobs = [await session.submit(spec) for _ in range(2)]
            await session.arrived("train-0", 2)
            await session.end()
    async with local_session(short_folder, own_redis, new=False) as session:
        found = [rewards(await session.done(job)) for job in jobs]
        assert found[0] == found[1]
