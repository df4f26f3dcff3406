"""A full disk, a full shared memory or a full Redis stops jobs for a while, and loses nothing."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.actors.test_startup_event_backlog import (
    W0,
    W1,
    Session,
    consume,
    end,
    evaluated,
    post,
    unfinished,
)
from tests.samples import JOB, SPEC
from tests.small_disk import fill
from tests.small_disk import small_disk as mounted
from tests.waiting import wait_until
from tlt.actors.coordinator.pause_jobs_without_room import RoomWatch
from tlt.base.id_types import Incarnation, WorkerId
from tlt.blobs.blob_files import place_blobs
from tlt.policies.run.run_state import Phase
from tlt.policies.session.room import PolicySize, answer_bytes, checkpoint_bytes
from tlt.protocol.events import JobPrepared, WorkerLost
from tlt.protocol.shared_values import Prepared
from tlt.spec.config import HIDDEN_STATES
from tlt.store.embedded_redis import EmbeddedRedis
from tlt.store.redis_connection import refused_writes
from tlt.store.redis_memory import read_memory

WEIGHTS = 1_000_000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of a megabyte where the session's runs are."""
    with mounted(tmp_path / "run") as folder:
        yield folder


async def test_waits_until_the_journal_can_be_written(
    redis_url: str, tmp_path: Path, small_disk: Path
) -> None:
    session = Session(tmp_path, redis_url)
    first = session.coordinator()
    await first.recover()
    await post(first, session.begin())
    await consume(first)
    filler = fill(small_disk)
    answers = [evaluated(prompt, W0, 1, session.answer) for prompt in range(4)]
    await post(first, [*answers, *answers * 9])  # more than the journal's last page has room for
    consuming = asyncio.create_task(consume(first))
    waits = first.committer.disk_waits
    await wait_until(lambda: waits.waiting is not None)
    assert "No space left on device" in str(waits.waiting)
    filler.unlink()
    await consuming
    assert waits.waiting is None
    await end(first)

    second = session.coordinator()
    await second.recover()  # replays the journal
    state = second.deciders.runs.states[JOB].state
    await end(second)
    assert unfinished(state) == {4, 5, 6, 7}


async def test_waits_until_redis_takes_writes(tmp_path: Path, short_folder: Path) -> None:
    server = EmbeddedRedis(tmp_path / "redis", short_folder / "redis.sock")
    server.start()
    session = Session(tmp_path, server.url)
    first = session.coordinator()
    await first.recover()
    await post(first, session.begin())
    connection = first.effects.connection
    await connection.config_set("maxmemory", 1)
    consuming = asyncio.create_task(consume(first))
    await wait_until(lambda: refused_writes(connection, 60.0))
    complaint = (await read_memory(connection)).complaint()
    assert complaint is not None
    assert "maxmemory" in complaint
    await connection.config_set("maxmemory", 0)
    await consuming
    assert (await read_memory(connection)).complaint() is None
    state = first.deciders.runs.states[JOB].state
    await end(first)
    server.stop()
    assert unfinished(state) == set(range(8))


def _lost(worker: WorkerId, incarnation: int) -> WorkerLost:
    return WorkerLost(
        worker=worker, incarnation=Incarnation(incarnation), reason="test", returning=True
    )


async def test_pauses_a_job_without_room_until_there_is_some_to_spare(
    redis_url: str, tmp_path: Path
) -> None:
    policy = PolicySize(weights=WEIGHTS, trained=WEIGHTS, width=4)
    needed = answer_bytes(SPEC) + checkpoint_bytes(SPEC, policy, None)
    free = {"bytes": needed // 2}
    session = Session(tmp_path, redis_url)
    first = session.coordinator()
    await first.recover()
    watch = RoomWatch(session.spec, first.effects, first.deciders, lambda _: free["bytes"])
    prepared = Prepared(
        train_prompts=8, eval_prompts=8, policy_weights=WEIGHTS, trained_weights=WEIGHTS
    )
    await post(first, [*session.begin()[:-1], JobPrepared(job=JOB, prepared=prepared)])
    await consume(first)
    refused = await watch.look_before_start(JOB, SPEC, prepared)
    assert refused is not None
    assert str(refused.shortage).startswith(f"6.1 MB free in {tmp_path / 'run'}; a checkpoint")
    states = session.spec.job_flight(JOB) / HIDDEN_STATES
    states.mkdir(parents=True)
    await watch.look(time.time())
    await post(first, [_lost(W0, 1)])
    await consume(first)
    assert states.exists()
    await post(first, [_lost(W1, 2)])
    await consume(first)
    record = first.effects.records[JOB]
    assert record.status == "paused"
    assert not states.exists()
    assert record.pause is not None
    assert record.pause.shortage == refused.shortage
    run = first.deciders.runs.states[JOB]
    assert run.state.phase is Phase.PAUSED

    # at last the clock is set back
    for seconds, spare in ((11, 1.2), (5, 4.0), (-3600, 4.0)):
        assert first.effects.records[JOB].status == "paused"
        free["bytes"] = int(spare * needed)
        await watch.look(time.time() + seconds)
        await consume(first)
    assert first.effects.records[JOB].status == "running"
    assert run.state.phase is Phase.POLICY_UPDATE
    await end(first)


async def test_a_job_that_is_paused_for_its_store_goes_on_once_the_store_answers(
    redis_url: str, tmp_path: Path
) -> None:
    session = Session(tmp_path, redis_url)
    first = session.coordinator()
    await first.recover()
    watch = RoomWatch(session.spec, first.effects, first.deciders)
    await post(first, session.begin())
    await consume(first)
    place_blobs(tmp_path / "run", f"local://{tmp_path}/store")
    refused = await watch.look_before_start(JOB, SPEC, None)
    assert refused is not None
    assert str(refused.shortage).startswith(f"local://{tmp_path}/store: cannot be written: ")
    await post(first, [refused, _lost(W0, 1), _lost(W1, 2)])
    await consume(first)
    for _ in range(2):
        assert first.effects.records[JOB].status == "paused"
        await watch.look(time.time() + 11)
        await consume(first)
        (tmp_path / "store").mkdir(exist_ok=True)
    assert first.effects.records[JOB].status == "running"
    await end(first)


async def test_needs_room_where_the_checkpoint_is_written(redis_url: str, tmp_path: Path) -> None:
    session = Session(tmp_path, redis_url)
    first = session.coordinator()
    await first.recover()
    await post(first, session.begin())
    await consume(first)
    policy = Prepared(
        train_prompts=8, eval_prompts=8, policy_weights=WEIGHTS, trained_weights=WEIGHTS
    )
    flight = Path(session.spec.flight)
    for url, place in ((f"file://{tmp_path}/other", tmp_path / "other"), ("memory://b", flight)):
        place_blobs(tmp_path / "run", url)
        free = {place: 4 * 3 * WEIGHTS - 1}
        watch = RoomWatch(
            session.spec, first.effects, first.deciders, lambda at, free=free: free.get(at, 1 << 40)
        )
        place.mkdir(exist_ok=True)
        refused = await watch.look_before_start(JOB, SPEC, policy)
        assert refused is not None
        assert f"free in {place}; " in str(refused.shortage)
    await end(first)
