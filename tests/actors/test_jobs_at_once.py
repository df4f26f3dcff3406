"""The runs of jobs that run at once hear of their own workers only, whichever are lost or join."""

import time
from pathlib import Path

import msgspec

from tests.actors.test_startup_event_backlog import W0, W1, Session, consume, end, post
from tests.samples import SPEC
from tlt.actors.coordinator.coordinator import Coordinator
from tlt.actors.coordinator.pause_jobs_without_room import RoomWatch
from tlt.base.id_types import Incarnation, JobId, WorkerId
from tlt.data.dataset import Prompt, Prompts, prompts_file
from tlt.policies.session.room import PolicySize, answer_bytes, checkpoint_bytes
from tlt.protocol.commands import OpenJob, PauseJob, WorkerCommand
from tlt.protocol.events import AnyEvent, JobPrepared, JobSubmitted, WorkerJoined, WorkerLost
from tlt.protocol.shared_values import Heartbeat, Prepared, WorkerInfo
from tlt.spec.config import WorkersSpec
from tlt.store.message_codec import Codec

A, B, BOTH, C = JobId("a-1"), JobId("b-2"), JobId("both-3"), JobId("c-4")
W2 = WorkerId("w2")
WEIGHTS = 1_000_000
_COMMANDS = Codec[WorkerCommand](WorkerCommand)


def submitted(folder: Path, job: JobId, workers: int) -> JobSubmitted:
    run = folder / "runs" / job
    rows = [Prompt(tokens=(1, 2), answer="7", row={}) for _ in range(8)]
    for part in ("train", "eval"):
        Prompts.write(prompts_file(run, part), rows)
    spec = msgspec.structs.replace(SPEC, workers=WorkersSpec(count=workers))
    return JobSubmitted(job=job, spec=spec, folder=str(run))


def joined(worker: WorkerId, incarnation: int) -> WorkerJoined:
    info = WorkerInfo(
        worker=worker, incarnation=Incarnation(incarnation), ranks=1, host="h", rendezvous="h:1"
    )
    return WorkerJoined(info=info)


def lost(worker: WorkerId, incarnation: int, *, returning: bool) -> WorkerLost:
    return WorkerLost(
        worker=worker, incarnation=Incarnation(incarnation), reason="test", returning=returning
    )


def prepared(job: JobId) -> JobPrepared:
    return JobPrepared(
        job=job,
        prepared=Prepared(
            train_prompts=8, eval_prompts=8, policy_weights=WEIGHTS, trained_weights=WEIGHTS
        ),
    )


def both_running(folder: Path) -> list[AnyEvent]:
    return [
        joined(W0, 1),
        joined(W1, 2),
        submitted(folder, A, 1),
        submitted(folder, B, 1),
        prepared(A),
        prepared(B),
    ]


async def decide(coordinator: Coordinator, *events: AnyEvent) -> None:
    await post(coordinator, events)
    await consume(coordinator)


def workers_of(coordinator: Coordinator) -> dict[JobId, dict[WorkerId, int]]:
    return {
        job: {worker: known.info.incarnation for worker, known in run.state.workers.items()}
        for job, run in coordinator.deciders.runs.states.items()
    }


async def opened(coordinator: Coordinator, worker: WorkerId, incarnation: int) -> list[JobId]:
    """Return the jobs that a worker was told to open."""
    key = coordinator.effects.keys.commands(worker, Incarnation(incarnation))
    entries = await coordinator.effects.connection.xrange(key)
    commands = [_COMMANDS.decode(fields) for _, fields in entries]
    return [command.job for command in commands if isinstance(command, OpenJob)]


async def test_runs_hear_of_their_own_workers(redis_url: str, tmp_path: Path) -> None:
    session = Session(tmp_path, redis_url)
    first = session.coordinator()
    await first.recover()
    await decide(first, *both_running(tmp_path), submitted(tmp_path, BOTH, 2))
    assert workers_of(first) == {A: {W0: 1}, B: {W1: 2}}
    assert [await opened(first, W0, 1), await opened(first, W1, 2)] == [[A], [B]]

    await decide(first, lost(W1, 2, returning=True), joined(W1, 3))
    assert workers_of(first) == {A: {W0: 1}, B: {W1: 3}}
    await decide(first, lost(W1, 3, returning=False), joined(W2, 4))
    assert workers_of(first) == {A: {W0: 1}, B: {W2: 4}}
    assert await opened(first, W2, 4) == [B]
    runs = first.deciders.runs.states
    assert runs[B].state.newest_incarnations == {W1: 3, W2: 4}
    assert runs[A].state.newest_incarnations == {W0: 1}
    # a rank of W1 didn't start: what its last incarnation may still have taken is written again
    await decide(first, lost(W1, 5, returning=True))
    assert runs[B].state.newest_incarnations == {W1: 5, W2: 4}
    # W1 is back, and serves neither
    await decide(first, joined(W1, 6))
    assert runs[B].state.newest_incarnations == {W2: 4}
    assert await opened(first, W1, 6) == []
    queued = first.effects.records[BOTH]
    assert queued.status == "queued"
    # as its submission would have
    await first.effects.connection.hset(first.effects.keys.jobs, BOTH, msgspec.json.encode(queued))
    await end(first)

    second = session.coordinator()
    beats = {W0: 1, W1: 6, W2: 4}
    for worker, incarnation in beats.items():
        beat = heartbeat(incarnation)
        await second.effects.connection.hset(second.effects.keys.heartbeats, worker, beat)
    await second.recover()
    assert workers_of(second) == {A: {W0: 1}, B: {W2: 4}}
    await decide(second, PauseJob(job=A), lost(W0, 1, returning=True))
    assert second.effects.records[BOTH].status == "queued"
    await decide(second, joined(W0, 7), prepared(BOTH))
    assert workers_of(second) == {A: {}, B: {W2: 4}, BOTH: {W0: 7, W1: 6}}
    assert await opened(second, W0, 7) == [BOTH]
    await end(second)


async def test_runs_that_end_with_their_session_go_on_with_the_same_workers(
    redis_url: str, tmp_path: Path
) -> None:
    session = Session(tmp_path, redis_url)
    first = session.coordinator()
    await first.recover()
    await decide(first, *both_running(tmp_path), lost(W1, 2, returning=True))
    # this job is still being prepared
    await decide(first, joined(W2, 3), submitted(tmp_path, C, 1), lost(W2, 3, returning=True))
    await end(first)
    second = session.coordinator()
    await second.recover()  # no worker has a heartbeat
    assert workers_of(second) == {A: {}, B: {}}
    assert second.deciders.session.state.returning_workers == set()
    await decide(second, joined(W1, 4), joined(W2, 5), joined(W0, 6), prepared(C))
    assert workers_of(second) == {A: {W0: 6}, B: {W1: 4}, C: {W2: 5}}
    assert all(run.state.losses <= 1 for run in second.deciders.runs.states.values())
    await end(second)


async def test_of_two_jobs_without_room_for_both_the_later_one_is_paused(
    redis_url: str, tmp_path: Path
) -> None:
    size = PolicySize(weights=WEIGHTS, trained=WEIGHTS, width=4)
    needed = answer_bytes(SPEC) + checkpoint_bytes(SPEC, size, None)
    session = Session(tmp_path, redis_url)
    first = session.coordinator()
    await first.recover()
    watch = RoomWatch(session.spec, first.effects, first.deciders, lambda _: needed * 3 // 2)
    await decide(first, *both_running(tmp_path))
    await watch.look(time.time())
    await consume(first)
    assert first.deciders.session.state.jobs[A].pause is None
    await decide(first, lost(W1, 2, returning=True))
    pause = first.effects.records[B].pause
    assert pause is not None
    assert "6.1 MB free" in str(pause.shortage)
    assert "beside what other jobs need" in str(pause.shortage)
    await watch.look(time.time() + 60)
    await consume(first)
    assert first.effects.records[B].status == "paused"
    assert first.effects.records[A].status == "running"
    await end(first)


def heartbeat(incarnation: int) -> bytes:
    return msgspec.msgpack.encode(
        Heartbeat(
            incarnation=Incarnation(incarnation),
            counter=1,
            progress=0,
            running=0,
            pid=1,
            rank_pids=(2,),
            job=None,
        )
    )
