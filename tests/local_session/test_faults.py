"""A job survives the death of any process, and no answer is lost or counted twice."""

import asyncio
import signal

import pytest

from tests.local_session.quick_parts import InlineRewards
from tests.local_session.session import LocalSession, changed, local_session
from tlt.base.id_types import WorkerId
from tlt.protocol.events import PolicyPublished, RolloutFinished, WorkerLost
from tlt.spec.config import JobSpec
from tlt.store.embedded_redis import EmbeddedRedis

W0, W1 = WorkerId("w0"), WorkerId("w1")
ANSWERS = 2 * 4 * 4


async def test_survives_a_rank_that_dies_while_decoding(
    session: LocalSession, spec: JobSpec
) -> None:
    expected = await session.undisturbed(spec)
    with session.gates.hold("train-0-answered"):
        job = await session.submit(spec)
        await session.arrived("train-0-answered", 4)
        await session.until(lambda: len(session.events(job, RolloutFinished)) == 4, "answers")
        await session.kill_rank("w1", 1)
        await session.until(lambda: session.events(job, WorkerLost), "loss")
    await session.assert_unharmed(job, expected)
    # what had been answered wasn't answered again
    assert len(session.events(job, RolloutFinished)) == ANSWERS
    (lost,) = session.events(job, WorkerLost)
    assert (lost.worker, lost.returning) == (W1, True)
    assert "w1-rank1 was ended by SIGKILL" in lost.reason
    assert session.fold(job).losses == 1


@pytest.mark.parametrize("shards", [1, "all"])
async def test_survives_a_rank_that_dies_in_an_update(
    session: LocalSession, spec: JobSpec, shards: int | str
) -> None:
    """The collective fails on all ranks, and fresh ones repeat the update from the checkpoint."""
    spec = changed(spec, algorithm={"checkpoint_every": 1, "shards": shards})
    expected = await session.undisturbed(spec)
    with session.gates.hold("update-1-w1"):
        job = await session.submit(spec)
        await session.arrived("update-1-w1", 2)
        await session.kill_rank("w1", 1)
        await session.until(lambda: session.events(job, WorkerLost), "loss")
    await session.assert_unharmed(job, expected)
    assert session.fold(job).losses >= 1


async def test_repeats_updates_since_the_last_checkpoint(
    session: LocalSession, spec: JobSpec
) -> None:
    """All fresh ranks have to make the first update again, too."""
    spec = changed(spec, algorithm={"steps": 3, "checkpoint_every": 3})
    expected = await session.undisturbed(spec)
    with session.gates.hold("updated-1-w1"):
        job = await session.submit(spec)
        await session.arrived("updated-1-w1", 2)
        await session.kill_rank("w1", 0)
        await session.until(lambda: session.events(job, WorkerLost), "loss")
    await session.assert_unharmed(job, expected)
    assert session.fold(job).losses >= 1


async def test_a_worker_with_fresh_ranks_takes_the_weights_of_another(
    session: LocalSession, spec: JobSpec
) -> None:
    """No checkpoint has them, and no update is made again."""
    spec = changed(spec, algorithm={"steps": 3, "checkpoint_every": 3})
    expected = await session.undisturbed(spec)
    with session.gates.hold("train-1-answered"):
        job = await session.submit(spec)
        await session.arrived("train-1-answered", 4)
        await session.kill_rank("w1", 0)
        await session.until(lambda: session.events(job, WorkerLost), "loss")
        await session.all_up()
    await session.assert_unharmed(job, expected)
    published = [event.policy.version for event in session.events(job, PolicyPublished)]
    assert published == [1, 2, 3]


async def test_replaces_a_rank_that_dies_without_a_job(
    session: LocalSession, spec: JobSpec
) -> None:
    await session.all_up()
    before = (await session.heartbeats())[W1].incarnation
    await session.kill_rank("w1", 1)

    def replaced() -> bool:
        info = session.known_workers().get(W1)
        return info is not None and info.incarnation > before

    await session.until(replaced, "new incarnation")
    job = await session.submit(spec)
    await session.done(job)
    session.assert_nothing_lost_or_doubled(job)


async def test_survives_a_rank_that_stands_still(session: LocalSession, spec: JobSpec) -> None:
    spec = changed(spec, workers={"stuck_seconds": 1.0})
    expected = await session.undisturbed(spec)
    with session.gates.hold("train-0-w1"):
        job = await session.submit(spec)
        await session.arrived("train-0-w1", 2)
        await session.kill_rank("w1", 1, signal.SIGSTOP)
    await session.assert_unharmed(job, expected)
    (lost,) = session.events(job, WorkerLost)
    assert "rank 1 made no progress for 1 s" in lost.reason


async def test_survives_the_death_of_a_worker(session: LocalSession, spec: JobSpec) -> None:
    """The worker that follows it reports the loss by its new incarnation."""
    expected = await session.undisturbed(spec)
    with session.gates.hold("train-0-answered"):
        job = await session.submit(spec)
        await session.arrived("train-0-answered", 4)
        await session.workers[W0].kill()
    session.workers[W0].start()
    await session.assert_unharmed(job, expected)


async def test_refuses_a_worker_that_slept_through_its_lease(
    short_folder, shared_redis: EmbeddedRedis, spec: JobSpec
) -> None:
    """It finishes its answers and reports them, after others have taken its prompts."""
    async with local_session(
        short_folder, shared_redis, ranks_per_worker=2, lease_seconds=1.0
    ) as session:
        expected = await session.undisturbed(spec)
        before = (await session.heartbeats())[W0].incarnation
        with session.gates.hold("train-0"):
            job = await session.submit(spec)
            await session.arrived("train-0", 4)
            session.workers[W0].link.cut()
        await session.until(lambda: session.events(job, WorkerLost), "end of the lease")
        await session.until(lambda: session.run(job).joinpath("answers").exists(), "answers")
        session.workers[W0].link.join()
        await session.assert_unharmed(job, expected)
        (lost,) = session.events(job, WorkerLost)
        assert "no heartbeat" in lost.reason

        async def is_back() -> bool:
            return (await session.heartbeats())[W0].incarnation > before

        await session.until(is_back, "next incarnation")


async def test_survives_the_death_of_the_coordinator(session: LocalSession, spec: JobSpec) -> None:
    expected = await session.undisturbed(spec)
    with session.gates.hold("train-0-answered"):
        job = await session.submit(spec)
        await session.arrived("train-0-answered", 4)
        await session.kill_coordinator()
        session.start_coordinator()
    await session.assert_unharmed(job, expected)
    assert session.fold(job).losses == 0


async def test_survives_the_death_of_the_reward_scorer(
    session: LocalSession, spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies while it scores answers that it has read."""
    expected = await session.undisturbed(spec)
    begun: list[str] = []

    async def score_for_ever(_: InlineRewards, completion: str, *others: object, **known: object):
        begun.append(completion)
        await asyncio.Event().wait()

    with monkeypatch.context() as slow:
        slow.setattr(InlineRewards, "score", score_for_ever)
        job = await session.submit(spec)
        await session.until(lambda: len(begun) >= 4, "scoring")
        await session.kill_scorer()
    session.start_scorer()
    await session.assert_unharmed(job, expected)


async def test_survives_the_death_of_redis(
    short_folder, own_redis: EmbeddedRedis, spec: JobSpec
) -> None:
    async with local_session(short_folder, own_redis, ranks_per_worker=2) as session:
        expected = await session.undisturbed(spec)
        with session.gates.hold("train-0-answered"):
            job = await session.submit(spec)
            await session.arrived("train-0-answered", 4)
            await session.kill_redis()
            await session.start_redis()
        await session.assert_unharmed(job, expected)


async def test_a_job_reaches_its_end_step_by_step(session: LocalSession, spec: JobSpec) -> None:
    snapshot = await session.done(await session.submit(spec))
    assert [step.rollouts for step in snapshot.steps] == [16, 16]
