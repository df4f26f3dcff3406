"""A session through its page: jobs submitted and cancelled, streams and who holds what."""

import asyncio
import time

import httpx
import msgspec
import pytest

from tests.dashboard.conftest import OURS
from tests.samples import JOB, SPEC, prompt
from tlt.config import SessionSpec, to_yaml
from tlt.dashboard.health import Watcher
from tlt.dashboard.session_feed import SessionFeed
from tlt.loggers import installed
from tlt.messages import (
    AnyEvent,
    Heartbeat,
    JobCancelRequested,
    JobSubmitted,
    PromptIssued,
    RolloutDropped,
)
from tlt.store.codec import Codec
from tlt.store.connection import Connection
from tlt.store.jobs import Jobs
from tlt.store.keys import COORDINATOR, ROLLOUT, Keys
from tlt.store.stream import Consumer, Stream
from tlt.types import Attempt, Epoch, Incarnation, JobId, Member, PromptIndex, Step

_EVENTS = Codec[AnyEvent](AnyEvent)
_PROMPTS = Codec[PromptIssued](PromptIssued)


def beat(incarnation: int, counter: int = 1, ranks: tuple[int, ...] = (2,)) -> bytes:
    return msgspec.msgpack.encode(
        Heartbeat(
            incarnation=Incarnation(incarnation),
            counter=counter,
            progress=0,
            running=3,
            pid=1,
            rank_pids=ranks,
            job=JOB,
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
    monkeypatch.setitem(installed._NEEDED, "wandb", ("no_such_thing", "no-such-thing"))
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
    await connection.hset(keys.heartbeats, "w0", beat(7))
    await connection.hset(keys.heartbeats, "w1", beat(8, ranks=()))
    await Consumer(prompts, ROLLOUT, "7").read(2, 1)
    await Consumer(prompts, ROLLOUT, "8").read(1, 1)
    health, holding = await Watcher(connection, session).look(JOB)
    assert health.error is None
    assert [(w.worker, w.ranks, w.running) for w in health.workers] == [("w0", 1, 3), ("w1", 0, 3)]
    [waiting] = [stream for stream in health.streams if stream.name == "prompts"]
    assert (waiting.depth, waiting.pending, waiting.unread) == (5, 3, True)
    assert holding.running == 3
    assert sorted((held.prompt, held.worker) for held in holding.longest) == [
        (0, "w0"),
        (1, "w0"),
        (2, "w1"),
    ]


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
        transaction.xadd(keys.dead_letters, {b"error": b"odd"})
        await transaction.execute()
    view = await SessionFeed(session, connection)._look()
    assert [advice.urgency for advice in view.advice] == [0]
    assert "1 entries are dead letters" in view.advice[0].what
    gone = msgspec.structs.replace(session, redis_url="unix:///tmp/nobody.sock")
    from tlt.store.connection import connect

    lost = connect(gone.redis_url)
    view = await SessionFeed(gone, lost)._look()
    assert view.health.error is not None
    assert "does not answer" in view.advice[0].what
    await lost.aclose()


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
