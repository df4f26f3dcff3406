"""A session through its page: jobs submitted and cancelled, streams and who holds what."""

import asyncio
import time
from types import SimpleNamespace

import httpx
import msgspec
import pytest

from tests.dashboard.conftest import OURS
from tests.samples import JOB, SPEC, prompt
from tlt.config import SessionSpec
from tlt.dashboard import session_feed
from tlt.dashboard.session_feed import SessionFeed, SessionView
from tlt.dashboard.session_health import Health, Watcher
from tlt.ids import Attempt, Epoch, Incarnation, JobId, Member, PromptIndex, Step, WorkerId
from tlt.loggers import installed_check
from tlt.protocol.commands import PromptIssued
from tlt.protocol.events import AnyEvent, JobCancelRequested, JobSubmitted, RolloutDropped
from tlt.protocol.records import Heartbeat
from tlt.spec_files import to_yaml
from tlt.store.job_records import Jobs
from tlt.store.message_codec import Codec
from tlt.store.redis_connection import Connection
from tlt.store.redis_keys import COORDINATOR, ROLLOUT, Keys
from tlt.store.redis_stream import Consumer, Stream

_EVENTS = Codec[AnyEvent](AnyEvent)
_PROMPTS = Codec[PromptIssued](PromptIssued)


def beat(
    incarnation: int, counter: int = 1, ranks: tuple[int, ...] = (2,), resident: int = 0
) -> bytes:
    return msgspec.msgpack.encode(
        Heartbeat(
            incarnation=Incarnation(incarnation),
            counter=counter,
            progress=0,
            running=3,
            pid=1,
            rank_pids=ranks,
            job=JOB,
            resident_bytes=resident,
        )
    )


async def heard(connection: Connection, keys: Keys) -> list[AnyEvent]:
    return [_EVENTS.decode(fields) for _, fields in await connection.xrange(keys.events)]


async def test_what_is_submitted_and_cancelled_reaches_the_coordinator(
    session_client: httpx.AsyncClient, connection: Connection, keys: Keys
) -> None:
    made = await session_client.post("/api/jobs", headers=OURS, json={"yaml": to_yaml(SPEC)})
    job = made.json()["job"]
    [submitted] = await heard(connection, keys)
    assert isinstance(submitted, JobSubmitted)
    assert (submitted.job, submitted.spec) == (job, SPEC)
    spec = await session_client.get(f"/api/jobs/{job}/spec")
    assert spec.json()["yaml"] == to_yaml(SPEC)
    cancelled = await session_client.post(f"/api/jobs/{job}/cancel", headers=OURS)
    assert cancelled.json()["job"] == job
    assert (await heard(connection, keys))[1:] == [JobCancelRequested(job=job)]


async def test_a_spec_that_is_wrong_is_told_in_a_line(
    session_client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(installed_check._NEEDED, "wandb", ("no_such_thing", "no-such-thing"))
    for yaml, complaint in (
        ("name: [", "not valid YAML"),
        ("", "a spec is a mapping"),
        ("policy: {pth: x}", "pth"),
        (to_yaml(msgspec.structs.replace(SPEC, loggers=("wandb",))), "pip install no-such-thing"),
    ):
        answer = await session_client.post("/api/jobs", headers=OURS, json={"yaml": yaml})
        assert answer.status_code == 400
        assert complaint in answer.json()["error"]
    unknown = await session_client.post("/api/jobs/nobody/cancel", headers=OURS)
    assert unknown.status_code == 404
    assert (await session_client.get("/api/events?job=nobody")).status_code == 404


async def test_streams_leases_and_who_holds_what(
    session: SessionSpec, connection: Connection, keys: Keys
) -> None:
    prompts = Stream(connection, keys.prompts(JOB), _PROMPTS)
    await prompts.ensure_group(ROLLOUT)
    async with connection.pipeline(transaction=True) as transaction:
        for index in range(5):
            prompts.add(transaction, prompt(index))
        await transaction.execute()
    await connection.hset(keys.heartbeats, "w0", beat(7, resident=3 << 30))
    await connection.hset(keys.heartbeats, "w1", beat(8, ranks=()))
    await Consumer(prompts, ROLLOUT, "7").read(2, 1)
    await Consumer(prompts, ROLLOUT, "8").read(1, 1)
    health, holding = await Watcher(connection, session).look(JOB)
    assert health.error is None
    assert [(w.worker, w.ranks, w.running) for w in health.workers] == [("w0", 1, 3), ("w1", 0, 3)]
    # as it says itself: on another host its processes have the numbers of others here
    assert [w.memory_bytes for w in health.workers] == [3 << 30, 0]
    [waiting] = [stream for stream in health.streams if stream.name == "prompts"]
    assert (waiting.depth, waiting.pending, waiting.unread) == (5, 3, True)
    assert holding is not None
    assert holding.running == 3
    assert sorted((held.prompt, held.worker) for held in holding.longest) == [
        (0, "w0"),
        (1, "w0"),
        (2, "w1"),
    ]


async def test_commands_wait_until_their_worker_obeys(
    session: SessionSpec, connection: Connection, keys: Keys
) -> None:
    await connection.hset(keys.heartbeats, "w0", beat(7))
    await connection.hset(keys.heartbeats, "w1", beat(8))
    key = keys.commands(WorkerId("w0"), Incarnation(7))
    await connection.xadd(key, {b"m": b""}, id=f"{int(1000 * (time.time() - 60))}-0")
    await connection.xadd(key, {b"m": b""})
    health, _ = await Watcher(connection, session).look(None)
    [commands] = [stream for stream in health.streams if stream.name == "commands"]
    assert commands.depth == 2
    assert 59.0 < commands.oldest_seconds < 120.0


async def test_a_heartbeat_that_stands_still_ages_by_our_own_clock(
    session: SessionSpec, connection: Connection, keys: Keys
) -> None:
    watcher = Watcher(connection, session)
    await connection.hset(keys.heartbeats, "w0", beat(1))
    await connection.hset(keys.heartbeats, "w1", beat(2))
    await watcher.look(None)
    begun = time.monotonic()
    await asyncio.sleep(0.25)
    await connection.hset(keys.heartbeats, "w1", beat(2, counter=2))
    health, _ = await watcher.look(None)
    silent = {worker.worker: worker.silent_seconds for worker in health.workers}
    assert 0.2 <= silent["w0"] <= time.monotonic() - begun + 0.1
    assert silent["w1"] < 0.2
    short = msgspec.structs.replace(session, lease_seconds=0.2)
    await connection.hset(keys.heartbeats, "w0", beat(1, ranks=()))
    late = Watcher(connection, short)
    late._seen = watcher._seen
    health, _ = await late.look(None)
    assert (health.silent, health.rankless) == (1, 0)


async def test_dead_letters_and_a_lost_redis_are_warned_of(
    session: SessionSpec, connection: Connection, keys: Keys
) -> None:
    events = Stream(connection, keys.events, _EVENTS)
    await events.ensure_group(COORDINATOR)
    dropped = RolloutDropped(
        job=JOB,
        epoch=Epoch(1),
        step=Step(0),
        attempt=Attempt(0),
        purpose="train",
        prompt=PromptIndex(0),
        member=Member(0),
        reason="",
    )
    async with connection.pipeline(transaction=True) as transaction:
        events.add(transaction, dropped)
        transaction.xadd(keys.dead_letters, {b"source": b"events", b"error": b"odd"})
        await transaction.execute()
    view = await SessionFeed(session, connection).view()
    assert [advice.urgency for advice in view.advice] == [0]
    assert "1 entries are dead letters" in view.advice[0].what
    assert "of events: odd" in view.advice[0].what
    assert [(dead.source, dead.error) for dead in view.health.dead] == [("events", "odd")]
    gone = msgspec.structs.replace(session, redis_url="unix:///tmp/nobody.sock")
    from tlt.store.redis_connection import connect

    lost = connect(gone.redis_url)
    view = await SessionFeed(gone, lost).view()
    assert view.health.error is not None
    assert "does not answer" in view.advice[0].what
    await lost.aclose()


async def test_what_cannot_be_read_is_left_out_and_named(
    session: SessionSpec, connection: Connection, keys: Keys
) -> None:
    """Another release, or somebody's hand: what is sound goes on being told."""
    feed = SessionFeed(session, connection)
    running = msgspec.structs.replace(await feed.jobs.submit(SPEC), status="running")
    job = running.job
    await connection.hset(keys.jobs, job, msgspec.json.encode(running))
    await connection.hset(keys.jobs, "odd-2", b'{"job": 3}')
    await connection.hset(keys.heartbeats, "w0", beat(7))
    await connection.hset(keys.heartbeats, "w1", b"\xff")
    await connection.hset(keys.heartbeats, b"\xff\xfe", beat(9))
    prompts = Stream(connection, keys.prompts(job), _PROMPTS)
    await prompts.ensure_group(ROLLOUT)
    await connection.xadd(prompts.key, {b"v": b"99", b"m": b""})
    async with connection.pipeline(transaction=True) as transaction:
        prompts.add(transaction, prompt(0))
        await transaction.execute()
    await connection.xreadgroup(ROLLOUT, "somebody", {prompts.key: ">"}, count=2)
    view = await feed.view()
    assert [line.job for line in view.jobs] == [job]
    assert [worker.worker for worker in view.health.workers] == ["w0"]
    holding = feed.holding(job)
    assert holding is not None
    assert [(held.prompt, held.worker) for held in holding.longest] == [(0, None)]
    assert "odd-2" in view.advice[0].what
    await connection.hdel(keys.jobs, "odd-2")
    view = await feed.view()
    assert "the prompt" in (view.health.odd or "")


async def test_keys_of_another_kind_leave_the_rest_alone(
    session: SessionSpec, connection: Connection, keys: Keys
) -> None:
    await connection.set(keys.heartbeats, "not a hash")
    await connection.set(keys.dead_letters, "not a stream")
    view = await SessionFeed(session, connection).view()
    assert view.health.odd is not None
    assert view.health.redis_bytes > 0


async def test_the_feed_outlives_whatever_fails(
    session: SessionSpec, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_feed, "_TICK_SECONDS", 0.01)
    monkeypatch.setattr(session_feed, "_SHARE", 0)
    feed = SessionFeed(session, connection)
    looks = iter([AssertionError("a surprise"), Health(load=7.0)])

    async def look(_: object) -> tuple[Health, None]:
        found = next(looks, Health(load=7.0))
        if isinstance(found, Exception):
            raise found
        return found, None

    monkeypatch.setattr(feed._watcher, "look", look)
    bell = asyncio.Event()
    feed.listen(bell)
    async with asyncio.timeout(5):
        while b"a surprise" not in feed.whole():
            await bell.wait()
            bell.clear()
        while b'"load":7.0' not in feed.whole():
            await bell.wait()
            bell.clear()
    feed.leave(bell)
    await feed.stop()


async def test_who_comes_after_nobody_listened_is_not_told_what_was_then(
    session: SessionSpec, connection: Connection
) -> None:
    feed, bell = SessionFeed(session, connection), asyncio.Event()
    for _ in range(2):
        feed.listen(bell)
        assert feed.whole() == b"null"
        async with asyncio.timeout(5):
            await bell.wait()
        assert b'"name"' in feed.whole()
        bell.clear()
        feed.leave(bell)
    await feed.stop()


async def test_a_redis_that_is_slow_is_asked_again_soon(
    session: SessionSpec, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was waited for cost nobody anything."""
    feed = SessionFeed(session, connection)
    seen = await feed.view()
    slept: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def look_slowly() -> SessionView:
        await asyncio.wait({slept}, timeout=0.2)
        return seen

    async def sleep(seconds: float) -> None:
        feed.leave(bell)
        slept.set_result(seconds)

    monkeypatch.setattr(feed, "view", look_slowly)
    monkeypatch.setattr(session_feed, "asyncio", SimpleNamespace(sleep=sleep))
    bell = asyncio.Event()
    feed.listen(bell)
    assert await asyncio.wait_for(slept, 5) < 3.0  # at forty times what it took it were eight
    await feed.stop()


async def test_a_session_that_is_down_is_said_to_be(
    session: SessionSpec, connection: Connection
) -> None:
    down = msgspec.structs.replace(session, folder=f"{session.folder}-of-another")
    view = await SessionFeed(down, connection).view()
    assert not view.up
    assert [advice.what for advice in view.advice] == ["The session is down."]


async def test_the_page_hears_of_a_job_at_once(
    session_client: httpx.AsyncClient, session: SessionSpec, connection: Connection
) -> None:
    async with session_client.stream("GET", "/api/events", timeout=10) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        job: JobId | None = None
        async for line in answer.aiter_lines():
            if job is None:
                job = (await Jobs(connection, session).submit(SPEC)).job
            if line.startswith("data: {") and str(job) in line:
                view = msgspec.json.decode(line.removeprefix("data: "))
                assert view["jobs"][0]["status"] == "queued"
                return


async def test_prometheus_reads_the_session_and_its_job(
    session_client: httpx.AsyncClient, session: SessionSpec, connection: Connection, keys: Keys
) -> None:
    await connection.hset(keys.heartbeats, "w0", beat(1))
    await Jobs(connection, session).submit(SPEC)
    answer = await session_client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.text.splitlines()
    assert "tlt_workers 1.0" in lines
    assert 'tlt_jobs{status="queued"} 1.0' in lines
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
