"""A session that ends takes its workers along, and no answer that they had written."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from tests.samples import JOB, SPEC, answer
from tlt.actors.coordinator import Coordinator
from tlt.actors.recovery import answered, gone, unsaid
from tlt.blobs import Blobs
from tlt.config import SessionSpec
from tlt.dataset import Prompt, Prompts, prompts_file
from tlt.ids import EntryId, Incarnation, PromptIndex, WorkerId
from tlt.json_logs import serve_run
from tlt.policies import coordinator as decider
from tlt.policies.job.run_state import RunState
from tlt.protocol.events import (
    AnyEvent,
    JobPrepared,
    JobSubmitted,
    RolloutDropped,
    RolloutFinished,
    WorkerIdled,
    WorkerJoined,
    WorkerLost,
)
from tlt.protocol.records import Heartbeat, WorkerInfo
from tlt.protocol.refs import Tensor
from tlt.store.redis_stream import Entry

W0, W1 = WorkerId("w0"), WorkerId("w1")
_PROMPTS = 8


def _info(worker: WorkerId, incarnation: int) -> WorkerInfo:
    return WorkerInfo(
        worker=worker,
        incarnation=Incarnation(incarnation),
        ranks=1,
        host="here",
        rendezvous="here:1",
    )


def _beat(incarnation: int) -> Heartbeat:
    return Heartbeat(
        incarnation=Incarnation(incarnation),
        counter=1,
        progress=0,
        running=0,
        pid=1,
        rank_pids=(),
        job=None,
    )


def _evaluated(prompt: int, worker: WorkerId, incarnation: int) -> RolloutFinished:
    return msgspec.structs.replace(
        answer(0),
        purpose="eval",
        prompt=PromptIndex(prompt),
        worker=worker,
        incarnation=Incarnation(incarnation),
    )


def _idled(rollout: RolloutFinished) -> WorkerIdled:
    return WorkerIdled(
        job=JOB,
        epoch=rollout.epoch,
        step=rollout.step,
        attempt=rollout.attempt,
        worker=rollout.worker,
        incarnation=rollout.incarnation,
        purpose="eval",
        requeues=0,
    )


class _Session:
    """A session's files, for one coordinator after the other."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.spec = SessionSpec(
            name=folder.name,
            folder=str(folder / "session"),
            runs=str(folder / "runs"),
            flight=str(folder / "flight"),
            redis_url=redis_url,
        )
        self._run = folder / "run"
        for part in ("train", "eval"):
            rows = [Prompt(tokens=(1, 2), answer="7", row={}) for _ in range(_PROMPTS)]
            Prompts.write(prompts_file(self._run, part), rows)

    def coordinator(self) -> Coordinator:
        made = Coordinator(self.spec)
        made._prepare = lambda command: None  # the prompts are there
        return made

    def begin(self) -> list[AnyEvent]:
        algorithm = msgspec.structs.replace(SPEC.algorithm, eval_every=1)
        return [
            JobSubmitted(
                job=JOB,
                spec=msgspec.structs.replace(SPEC, algorithm=algorithm),
                folder=str(self._run),
            ),
            WorkerJoined(info=_info(W0, 1)),
            WorkerJoined(info=_info(W1, 2)),
            JobPrepared(job=JOB, train_prompts=_PROMPTS, eval_prompts=_PROMPTS),
        ]


async def _say(coordinator: Coordinator, events: Sequence[AnyEvent]) -> None:
    for event in events:
        await coordinator._post(event)


async def _read(coordinator: Coordinator) -> None:
    entries = await coordinator.consumer.read(100, None)
    await coordinator._commit([e.message for e in entries], [e.id for e in entries])


async def _end(coordinator: Coordinator) -> None:
    await coordinator.connection.aclose()
    for opened in (coordinator.session, coordinator.job, *coordinator.effects.prompts.values()):
        if opened is not None:
            opened.close()
    serve_run(None)


def _unfinished(state: RunState) -> set[int]:
    assert state.batch is not None
    return {p for p, group in state.batch.groups.items() if group.members[0].finished is None}


@pytest.mark.parametrize("memory", ["kept", "lost"])
async def test_answers_that_were_written_count_though_their_workers_are_gone(
    redis_url: str, tmp_path: Path, memory: str
) -> None:
    """Their prompts were acknowledged with them: nobody else will be given those."""
    session = _Session(tmp_path, redis_url)
    first = session.coordinator()
    await first._recover()
    await _say(first, session.begin())
    await _read(first)
    heard, *waiting = (_evaluated(prompt, W0, 1) for prompt in range(4))
    await _say(first, [heard])
    await _read(first)
    last = _evaluated(4, W1, 2)
    # and a life that nobody has heard of
    later = WorkerJoined(info=_info(W1, 3))
    await _say(first, [*waiting, last, _idled(last), later])
    await _end(first)
    if memory == "lost":
        shutil.rmtree(session.spec.flight)

    second = session.coordinator()
    await second._recover()
    assert second.job is not None
    state = second.job.state
    left = await second.consumer.read(100, None)
    assert await second.consumer.stream.held_by("coordinator", "coordinator") == []
    await _end(second)
    assert _unfinished(state) == {5, 6, 7}
    assert (state.workers, state.returning_workers, state.losses, left) == ({}, frozenset(), 0, [])


def test_who_beats_under_a_later_number_or_none_yet_is_another_life() -> None:
    workers = {W0: _info(W0, 4), W1: _info(W1, 5)}
    assert gone(workers, None, {W0: _beat(4), W1: _beat(4)}) == []
    for beats in ({W0: _beat(4)}, {W0: _beat(4), W1: _beat(0)}, {W0: _beat(4), W1: _beat(6)}):
        (lost,) = gone(workers, None, beats)
        assert (lost.worker, lost.incarnation, lost.with_session) == (W1, 5, True)


def test_who_said_itself_that_a_life_was_over_is_heard_in_its_turn() -> None:
    (over,) = gone({W0: _info(W0, 4)}, None, {W0: _beat(5)})
    said = msgspec.structs.replace(over, reason="a rank died", returning=True, with_session=False)
    assert unsaid([over], [Entry(EntryId("1-1"), said)]) == []
    earlier = msgspec.structs.replace(said, incarnation=Incarnation(3))
    assert unsaid([over], [Entry(EntryId("1-1"), earlier)]) == [over]


def test_who_was_to_return_to_a_session_that_ended_is_not_awaited() -> None:
    run = decider.new_run(JOB, SPEC)
    lost = WorkerLost(worker=W1, incarnation=Incarnation(5), reason="a rank died", returning=True)
    for event in (WorkerJoined(info=_info(W1, 5)), lost):
        run, _ = decider.decide(run, event, 0.0)
    assert run.returning_workers == {W1}
    assert gone({}, run, {W1: _beat(6)}) == []
    (event,) = gone({}, run, {})
    run, _ = decider.decide(run, event, 0.0)
    assert (run.returning_workers, run.losses) == (frozenset(), 1)


def test_an_answer_that_was_lost_with_the_shared_memory_is_dropped(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path / "flight", tmp_path / "run")
    ref = blobs.put(b"tokens", commit=False)
    long = msgspec.structs.replace(
        answer(0), tokens=Tensor(dtype="int32", shape=(1,), data=b"", blob=ref)
    )
    assert answered(long, blobs) is long
    blobs.release(ref)
    dropped = answered(long, blobs)
    assert isinstance(dropped, RolloutDropped)
    evaluated = msgspec.structs.replace(long, purpose="eval")
    assert answered(evaluated, blobs) is evaluated
    assert (dropped.prompt, dropped.member) == (long.prompt, long.member)
    assert "neither in" in dropped.reason
