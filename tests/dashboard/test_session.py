"""The dashboard of a session submits and cancels jobs, and shows streams and answers."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import msgspec
import pytest

from tests.dashboard.conftest import OURS
from tests.dashboard.runs import some_run, write_journal
from tests.samples import JOB, SPEC, prompt
from tlt.base.id_types import (
    Attempt,
    Epoch,
    Incarnation,
    JobId,
    Member,
    PromptIndex,
    Step,
    WorkerId,
)
from tlt.dashboard import session_feed
from tlt.dashboard.rollout_tail import RunningAnswers
from tlt.dashboard.session_feed import SessionFeed, SessionView
from tlt.dashboard.session_health import Health, HealthReader
from tlt.loggers import installed_check
from tlt.protocol.commands import CancelJob, PromptIssued
from tlt.protocol.events import AnyEvent, JobSubmitted, RolloutDropped
from tlt.protocol.shared_values import Heartbeat
from tlt.spec.config import SessionSpec, WorkersSpec
from tlt.spec.spec_files import to_yaml
from tlt.store.job_requests import Jobs
from tlt.store.message_codec import Codec
from tlt.store.redis_connection import Connection
from tlt.store.redis_keys import COORDINATOR, ROLLOUT, Keys
from tlt.store.redis_stream import Consumer, Stream

_EVENTS = Codec[AnyEvent](AnyEvent)
_PROMPTS = Codec[PromptIssued](PromptIssued)


def heartbeat(
    incarnation: int,
    counter: int = 1,
    ranks: tuple[int, ...] = (2,),
    resident: int = 0,
    job: JobId = JOB,
) -> bytes:
    return msgspec.msgpack.encode(
        Heartbeat(
            incarnation=Incarnation(incarnation),
            counter=counter,
            progress=0,
            running=3,
            pid=1,
            rank_pids=ranks,
            job=job,
            resident_bytes=resident,
        )
    )


async def sent_events(connection: Connection, keys: Keys) -> list[AnyEvent]:
    return [_EVENTS.decode(fields) for _, fields in await connection.xrange(keys.events)]


async def test_submission_and_cancellation_reach_the_coordinator(
    session_client: httpx.AsyncClient, connection: Connection, keys: Keys
) -> None:
    made = await session_client.post("/api/jobs", headers=OURS, json={"yaml": to_yaml(SPEC)})
    job = made.json()["job"]
    [submitted] = await sent_events(connection, keys)
    assert isinstance(submitted, JobSubmitted)
    assert (submitted.job, submitted.spec) == (job, SPEC)
    spec = await session_client.get(f"/api/jobs/{job}/spec")
    assert spec.json()["yaml"] == to_yaml(SPEC)
    cancelled = await session_client.post(f"/api/jobs/{job}/cancel", headers=OURS)
    assert cancelled.json()["job"] == job
    assert (await sent_events(connection, keys))[1:] == [CancelJob(job=job)]


async def test_refuses_a_wrong_spec_with_its_error(
    session_client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(installed_check.PACKAGES, "wandb", ("no_such_thing", "no-such-thing"))
    for yaml, complaint in (
        ("name: [", "not valid YAML"),
        ("", "a spec is a mapping"),
        ("policy: {pth: x}", "pth"),
        (to_yaml(msgspec.structs.replace(SPEC, loggers=("wandb",))), "pip install no-such-thing"),
    ):
        answer = await session_client.post("/api/jobs", headers=OURS, json={"yaml": yaml})
        assert answer.status_code == 400
        assert complaint in answer.json()["error"]
    unknown = await session_client.post("/api/jobs/unknown/cancel", headers=OURS)
    assert unknown.status_code == 404
    assert (await session_client.get("/api/events?job=unknown")).status_code == 404


async def test_reads_streams_leases_and_running_answers(
    session: SessionSpec, connection: Connection, keys: Keys
) -> None:
    prompts = Stream(connection, keys.prompts(JOB), _PROMPTS)
    await prompts.ensure_group(ROLLOUT)
    async with connection.pipeline(transaction=True) as transaction:
        for index in range(5):
            prompts.add(transaction, prompt(index))
        await transaction.execute()
    await connection.hset(keys.heartbeats, "w0", heartbeat(7, resident=3 << 30))
    await connection.hset(keys.heartbeats, "w1", heartbeat(8, ranks=()))
    await Consumer(prompts, ROLLOUT, "7").read(2, 1)
    await Consumer(prompts, ROLLOUT, "8").read(1, 1)
    health, answers = await HealthReader(connection, session).read([JOB])
    assert health.error is None
    assert [(w.worker, w.ranks, w.running) for w in health.workers] == [("w0", 1, 3), ("w1", 0, 3)]
    # memory comes from the heartbeat, because a worker's pids mean nothing on another host
    assert [w.memory_bytes for w in health.workers] == [3 << 30, 0]
    [waiting] = [stream for stream in health.streams if stream.name == "prompts"]
    assert (waiting.depth, waiting.pending, waiting.unread) == (5, 3, True)
    assert answers[JOB].running == 3
    assert sorted((answer.prompt, answer.worker) for answer in answers[JOB].longest) == [
        (0, "w0"),
        (1, "w0"),
        (2, "w1"),
    ]


async def test_shows_each_running_job_with_its_workers(
    session_client: httpx.AsyncClient, session: SessionSpec, connection: Connection, keys: Keys
) -> None:
    jobs = Jobs(connection, session)
    spec = msgspec.structs.replace(SPEC, workers=WorkersSpec(count=1))
    names: list[JobId] = []
    for number in range(2):
        running = msgspec.structs.replace(await jobs.submit(spec), status="running")
        names.append(running.job)
        await connection.hset(keys.jobs, running.job, msgspec.json.encode(running))
        await connection.hset(keys.heartbeats, f"w{number}", heartbeat(number, job=running.job))
        write_journal(some_run(number), Path(running.folder))
        prompts = Stream(connection, keys.prompts(running.job), _PROMPTS)
        await prompts.ensure_group(ROLLOUT)
        async with connection.pipeline(transaction=True) as transaction:
            prompts.add(transaction, prompt(number))
            await transaction.execute()
        await Consumer(prompts, ROLLOUT, str(number)).read(1, 1)
    whole = msgspec.structs.replace(SPEC, workers=WorkersSpec(count=2))
    waiting, behind = (await jobs.submit(whole)).job, (await jobs.submit(spec)).job
    feed = SessionFeed(session, connection)
    rows = {row.job: row for row in (await feed.view()).jobs}
    assert [(rows[job].workers, rows[job].wait) for job in (*names, waiting, behind)] == [
        ("w0", None),
        ("w1", None),
        ("asks for 2", "asks for 2 workers, of which 0 are free"),
        ("asks for 1", f"waits behind {waiting}"),
    ]
    for number, job in enumerate(names):
        answers = feed.running_answers(job)
        assert answers is not None
        assert [(a.prompt, a.worker) for a in answers.longest] == [(number, f"w{number}")]
    metrics = (await session_client.get("/metrics")).text
    for job in names:
        assert f'tlt_step{{job="{job}"}}' in metrics
        assert f'tlt_stream_entries{{stream="prompts",group="rollout",job="{job}"}} 1.0' in metrics


async def test_counts_commands_that_wait_for_their_worker(
    session: SessionSpec, connection: Connection, keys: Keys
) -> None:
    await connection.hset(keys.heartbeats, "w0", heartbeat(7))
    await connection.hset(keys.heartbeats, "w1", heartbeat(8))
    key = keys.commands(WorkerId("w0"), Incarnation(7))
    await connection.xadd(key, {b"m": b""}, id=f"{int(1000 * (time.time() - 60))}-0")
    await connection.xadd(key, {b"m": b""})
    health, _ = await HealthReader(connection, session).read([])
    [commands] = [stream for stream in health.streams if stream.name == "commands"]
    assert commands.depth == 2
    assert 59.0 < commands.oldest_seconds < 120.0


async def test_measures_silence_by_its_own_clock(
    session: SessionSpec, connection: Connection, keys: Keys
) -> None:
    short = msgspec.structs.replace(session, lease_seconds=0.4)
    reader = HealthReader(connection, short)
    await connection.hset(keys.heartbeats, "w0", heartbeat(1))
    await connection.hset(keys.heartbeats, "w1", heartbeat(2))
    await reader.read([])
    begun = time.monotonic()
    await asyncio.sleep(0.25)
    await connection.hset(keys.heartbeats, "w1", heartbeat(2, counter=2))
    health, _ = await reader.read([])
    silent = {worker.worker: worker.silent_seconds for worker in health.workers}
    assert 0.2 <= silent["w0"] <= time.monotonic() - begun + 0.1
    assert silent["w1"] < 0.2
    assert health.silent == 1


async def test_silent_worker_is_not_counted_as_rankless(
    session: SessionSpec, connection: Connection, keys: Keys
) -> None:
    reader = HealthReader(connection, msgspec.structs.replace(session, lease_seconds=0.0))
    await connection.hset(keys.heartbeats, "w0", heartbeat(1, ranks=()))
    await reader.read([])
    health, _ = await reader.read([])
    assert (health.silent, health.rankless) == (1, 0)


async def test_warns_of_dead_letters_and_of_a_redis_that_is_gone(
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
    assert "1 entries are dead letters" in view.advice[0].problem
    assert "of events: odd" in view.advice[0].problem
    assert [(dead.source, dead.error) for dead in view.health.newest_dead_letters] == [
        ("events", "odd")
    ]
    gone = msgspec.structs.replace(session, redis_url="unix:///tmp/missing.sock")
    from tlt.store.redis_connection import connect

    lost = connect(gone.redis_url)
    view = await SessionFeed(gone, lost).view()
    assert view.health.error is not None
    assert "does not answer" in view.advice[0].problem
    await lost.aclose()


async def test_leaves_out_and_names_what_cannot_be_read(
    session: SessionSpec, connection: Connection, keys: Keys
) -> None:
    feed = SessionFeed(session, connection)
    running = msgspec.structs.replace(await feed.jobs.submit(SPEC), status="running")
    job = running.job
    await connection.hset(keys.jobs, job, msgspec.json.encode(running))
    await connection.hset(keys.jobs, "odd-2", b'{"job": 3}')
    await connection.hset(keys.heartbeats, "w0", heartbeat(7))
    await connection.hset(keys.heartbeats, "w1", b"\xff")
    await connection.hset(keys.heartbeats, b"\xff\xfe", heartbeat(9))
    prompts = Stream(connection, keys.prompts(job), _PROMPTS)
    await prompts.ensure_group(ROLLOUT)
    await connection.xadd(prompts.key, {b"v": b"99", b"m": b""})
    async with connection.pipeline(transaction=True) as transaction:
        prompts.add(transaction, prompt(0))
        await transaction.execute()
    await connection.xreadgroup(ROLLOUT, "consumer", {prompts.key: ">"}, count=2)
    view = await feed.view()
    assert [line.job for line in view.jobs] == [job]
    assert [worker.worker for worker in view.health.workers] == ["w0"]
    answers = feed.running_answers(job)
    assert answers is not None
    assert [(answer.prompt, answer.worker) for answer in answers.longest] == [(0, None)]
    assert "odd-2" in view.advice[0].problem
    await connection.hdel(keys.jobs, "odd-2")
    view = await feed.view()
    assert "the prompt" in (view.health.unreadable or "")


async def test_keys_of_a_wrong_type_do_not_hide_the_rest(
    session: SessionSpec, connection: Connection, keys: Keys
) -> None:
    await connection.set(keys.heartbeats, "not a hash")
    await connection.set(keys.dead_letters, "not a stream")
    view = await SessionFeed(session, connection).view()
    assert view.health.unreadable is not None
    assert view.health.redis_bytes > 0


async def test_feed_survives_an_unexpected_error(
    session: SessionSpec, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_feed, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(session_feed, "CORE_SHARE", 0)
    feed = SessionFeed(session, connection)
    results = iter([AssertionError("a surprise"), Health(load=7.0)])

    async def read(_: object) -> tuple[Health, dict[JobId, RunningAnswers]]:
        result = next(results, Health(load=7.0))
        if isinstance(result, Exception):
            raise result
        return result, {}

    monkeypatch.setattr(feed.health_reader, "read", read)
    wakeup = asyncio.Event()
    feed.add_listener(wakeup)
    async with asyncio.timeout(5):
        for content in (b"a surprise", b'"load":7.0'):
            while content not in feed.full_state():
                await wakeup.wait()
                wakeup.clear()
    feed.remove_listener(wakeup)
    await feed.stop()


async def test_new_listener_does_not_receive_an_outdated_message(
    session: SessionSpec, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_feed, "CORE_SHARE", 0)
    feed, wakeup = SessionFeed(session, connection), asyncio.Event()
    for _ in range(2):
        feed.add_listener(wakeup)
        assert feed.full_state() == b"null"
        async with asyncio.timeout(5):
            await wakeup.wait()
        assert b'"name"' in feed.full_state()
        wakeup.clear()
        feed.remove_listener(wakeup)
    await feed.stop()


async def test_slow_redis_does_not_lengthen_the_pause(
    session: SessionSpec, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting for a reply takes no processor time."""
    feed = SessionFeed(session, connection)
    seen = await feed.view()
    slept: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def view_slowly() -> SessionView:
        await asyncio.wait({slept}, timeout=0.2)
        return seen

    async def sleep(seconds: float) -> None:
        feed.remove_listener(wakeup)
        slept.set_result(seconds)

    monkeypatch.setattr(feed, "view", view_slowly)
    monkeypatch.setattr(session_feed, "asyncio", SimpleNamespace(sleep=sleep))
    wakeup = asyncio.Event()
    feed.add_listener(wakeup)
    assert (
        await asyncio.wait_for(slept, 5) < 3.0
    )  # elapsed time instead of processor time would make it longer
    await feed.stop()


async def test_warns_that_the_session_is_down(session: SessionSpec, connection: Connection) -> None:
    down = msgspec.structs.replace(session, folder=f"{session.folder}-of-another")
    view = await SessionFeed(down, connection).view()
    assert not view.up
    assert [advice.problem for advice in view.advice] == ["The session is down."]


async def test_event_stream_sends_a_submitted_job(
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


async def test_metrics_cover_the_session_and_its_jobs(
    session_client: httpx.AsyncClient, session: SessionSpec, connection: Connection, keys: Keys
) -> None:
    await connection.hset(keys.heartbeats, "w0", heartbeat(1))
    await Jobs(connection, session).submit(SPEC)
    answer = await session_client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.text.splitlines()
    assert "tlt_workers 1.0" in lines
    assert 'tlt_jobs{status="queued"} 1.0' in lines
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
