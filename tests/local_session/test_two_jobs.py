"""Two jobs run at once, each on a worker of its own, as if the other one weren't there."""

import msgspec

from tests.local_session.session import LocalSession, changed, rewards
from tlt.spec.config import JobSpec


async def test_two_jobs_at_once_have_the_rewards_of_each_alone(
    session: LocalSession, spec: JobSpec
) -> None:
    """The coordinator is killed meanwhile; a job that asks for both workers waits for both jobs."""
    one_worker = changed(spec, workers={"count": 1})
    specs = [msgspec.structs.replace(one_worker, seed=seed) for seed in (3, 4)]
    alone = [await session.undisturbed(each) for each in specs]
    assert alone[0] != alone[1]

    with session.gates.hold("train-0-answered"):
        beside = [await session.submit(each) for each in specs]
        both = await session.submit(changed(spec, workers={"count": 2}))
        await session.arrived("train-0-answered", 4)
        assert session.status(both) == "queued"
        await session.kill_coordinator()
        session.start_coordinator()
    for job, expected in zip(beside, alone, strict=True):
        found = await session.assert_unharmed(job, expected)
        assert found.losses == 0
    await session.done(both)

    first, second, last = (session.journal(job) for job in (*beside, both))
    assert max(first[0].at, second[0].at) < min(first[-1].at, second[-1].at)
    assert last[0].at >= max(first[-1].at, second[-1].at)
    workers = [set(session.fold(job).workers) for job in (*beside, both)]
    assert [len(each) for each in workers] == [1, 1, 2]
    assert workers[0] | workers[1] == workers[2]


async def test_a_lost_worker_harms_its_own_job_only(session: LocalSession, spec: JobSpec) -> None:
    one_worker = changed(spec, workers={"count": 1})
    specs = [msgspec.structs.replace(one_worker, seed=seed) for seed in (3, 4)]
    alone = [await session.undisturbed(each) for each in specs]
    with session.gates.hold("train-0-answered"):
        jobs = [await session.submit(each) for each in specs]
        await session.arrived("train-0-answered", 4)
        await session.kill_rank("w1", 0)
        await session.until(lambda: sum(session.fold(job).losses for job in jobs), "loss")
        # its next incarnation joins while both jobs run
        await session.all_up()
    for job, expected in zip(jobs, alone, strict=True):
        await session.assert_unharmed(job, expected)
    assert sorted(session.fold(job).losses for job in jobs) == [0, 1]
    assert rewards(session.fold(jobs[0])) == alone[0]
