"""A paused job gives its workers to the next one, and later goes on as if nothing had happened."""

from tests.local_session.session import LocalSession, changed
from tlt.policies.run.run_state import Phase
from tlt.spec.config import JobSpec


async def test_goes_on_after_a_pause_with_the_same_rewards(
    alone: LocalSession, spec: JobSpec
) -> None:
    """Another job runs meanwhile, and the coordinator is killed while the job is paused."""
    expected = await alone.undisturbed(spec)
    with alone.gates.hold("train-1-answered"):
        paused = await alone.submit(spec)
        other = await alone.submit(changed(spec, algorithm={"steps": 1}))
        await alone.arrived("train-1-answered")
        assert alone.status(other) == "queued"
        assert "is paused" in (await alone.tlt("pause", paused)).stdout
    await alone.until(lambda: alone.status(paused) == "paused", "pause")
    assert f"tlt resume {paused}" in (await alone.tlt("jobs")).stdout
    await alone.kill_coordinator()
    alone.start_coordinator()
    await alone.done(other)
    assert f"{paused} is paused for" in (await alone.tlt("status")).stdout
    assert alone.fold(paused).phase is Phase.PAUSED

    await alone.tlt("resume", paused)
    found = await alone.assert_unharmed(paused, expected)
    assert found.losses == 0
    refused = await alone.tlt("pause", paused, code=2)
    assert "a job that has ended can't be paused" in refused.stderr


async def test_a_paused_job_can_be_cancelled(alone: LocalSession, spec: JobSpec) -> None:
    with alone.gates.hold("train-0"):
        job = await alone.submit(spec)
        await alone.arrived("train-0")
        await alone.tlt("pause", job)
    await alone.tlt("cancel", job)
    assert alone.status(job) == "cancelled"
