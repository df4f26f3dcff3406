"""A job that starts from another's checkpoint goes on as if nothing had disturbed the other."""

import shutil

import pytest

from tests.local_session.session import LocalSession, changed, write_spec
from tlt.base.id_types import JobId
from tlt.protocol.commands import StartJob
from tlt.report import Snapshot, StepSummary
from tlt.spec.config import JobSpec

STEPS = 6


@pytest.fixture
def spec(spec: JobSpec) -> JobSpec:
    """Return a job that saves a checkpoint every two steps, and whose learning rate rises."""
    return changed(spec, algorithm={"steps": STEPS, "warmup_steps": STEPS, "checkpoint_every": 2})


async def submit_from(
    session: LocalSession, spec: JobSpec, start: str, **algorithm: object
) -> JobId:
    file = write_spec(session, changed(spec, algorithm=algorithm))
    return JobId((await session.json("submit", file, "--from", start))["job"])


async def steps_of(session: LocalSession, spec: JobSpec) -> tuple[JobId, tuple[StepSummary, ...]]:
    """Run a job that nothing disturbs."""
    await session.all_up()
    job = await session.submit(spec)
    return job, tuple((await session.done(job)).steps)


def assert_went_on(
    session: LocalSession, job: JobId, start: str, undisturbed: tuple[StepSummary, ...]
) -> Snapshot:
    """Assert that the steps from the checkpoint on are those of the undisturbed job."""
    step = int(start.rpartition("@")[2])
    began = session.journal(job)[0].event
    assert isinstance(began, StartJob)
    assert began.starts_from is not None
    found = session.fold(job)
    assert began.starts_from.name == found.starts_from == start
    assert [each.step for each in found.steps] == list(range(step, step + len(found.steps)))
    assert found.steps
    for ours, theirs in zip(found.steps, undisturbed[step:], strict=False):
        assert ours.reward == theirs.reward
        assert ours.metrics == theirs.metrics
    return found


async def test_a_retry_goes_on_where_a_job_was_cancelled(
    session: LocalSession, spec: JobSpec
) -> None:
    _, undisturbed = await steps_of(session, spec)
    with session.gates.hold("train-3-answered"):
        job = await session.submit(spec)
        await session.arrived("train-3-answered")
        await session.tlt("cancel", job)
    again = JobId((await session.json("retry", job))["job"])
    await session.done(again)
    assert len(assert_went_on(session, again, f"{job}@2", undisturbed).steps) == STEPS - 2
    refused = await session.tlt("retry", again, code=2)
    assert "neither failed nor cancelled" in refused.stderr


async def test_a_retry_of_a_job_that_never_ran_starts_where_it_would_have(
    session: LocalSession, spec: JobSpec
) -> None:
    first, _ = await steps_of(session, changed(spec, algorithm={"steps": 2}))
    with session.gates.hold("train-0"):
        running = await session.submit(spec)
        await session.arrived("train-0")
        queued = await submit_from(session, spec, first)
        await session.tlt("cancel", queued)
        again = await session.json("retry", queued)
        listed = {each["job"]: each for each in await session.json("jobs")}
        assert again["from"] == listed[again["job"]]["from"] == f"{first}@2"
        for job in (again["job"], running):
            await session.tlt("cancel", job)


async def test_a_job_goes_on_from_one_that_lost_its_worker(
    session: LocalSession, spec: JobSpec
) -> None:
    _, undisturbed = await steps_of(session, spec)
    fragile = changed(spec, workers={"max_restarts": 0}, algorithm={"keep_all": True})
    with session.gates.hold("update-4-w1"):
        job = await session.submit(fragile)
        await session.arrived("update-4-w1")
        await session.kill_rank("w1", 1)
        record = await session.ended(job)
    assert record.status == "failed"
    assert "was ended by SIGKILL" in str(record.error)
    await session.all_up()
    again = await submit_from(session, spec, f"{job}@2")
    await session.done(again)
    assert_went_on(session, again, f"{job}@2", undisturbed)


async def test_a_finished_job_gets_more_steps_with_and_without_shards(
    session: LocalSession, spec: JobSpec
) -> None:
    """Shards go on from whole copies, and whole copies from shards."""
    _, undisturbed = await steps_of(session, spec)
    whole, _ = await steps_of(session, changed(spec, algorithm={"steps": 2}))
    split = await submit_from(session, spec, whole, steps=4, shards="all")
    await session.done(split)
    assert_went_on(session, split, f"{whole}@2", undisturbed)
    last = await submit_from(session, spec, split)
    await session.done(last)
    assert len(assert_went_on(session, last, f"{split}@4", undisturbed).steps) == 2


async def test_finds_a_job_of_an_earlier_session_by_its_name(
    session: LocalSession, spec: JobSpec
) -> None:
    job, _ = await steps_of(session, spec)
    shutil.copytree(session.run(job), session.run(JobId("earlier-7")))
    file = write_spec(session, spec)
    refused = await session.tlt("submit", file, "--from", "earlier-7", code=2)
    assert f"earlier-7@{STEPS}: {STEPS} steps are done, and algorithm.steps is" in refused.stderr
    refused = await session.tlt("submit", file, "--from", "earlier-8", code=2)
    assert "there is no job 'earlier-8'" in refused.stderr
