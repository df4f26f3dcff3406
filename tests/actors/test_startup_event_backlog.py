"""The end of a session ends its workers but loses none of their answers."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from tests.local_session.session import close_coordinator
from tests.samples import JOB, SPEC, answer, written_answer
from tlt.actors.coordinator.coordinator import Coordinator
from tlt.actors.coordinator.startup_event_backlog import drop_if_lost, lost_workers, unreported
from tlt.base.id_types import EntryId, Incarnation, PromptIndex, WorkerId
from tlt.base.json_logs import serve_runs
from tlt.blobs.answer_files import AnswerFiles
from tlt.data.dataset import Prompt, Prompts, prompts_file
from tlt.policies.run import coordinator as decider
from tlt.policies.run.run_state import RunState
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
from tlt.protocol.refs import AnswerRef
from tlt.protocol.shared_values import Heartbeat, Prepared, WorkerInfo
from tlt.spec.config import SessionSpec
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


def evaluated(
    prompt: int, worker: WorkerId, incarnation: int, written: AnswerRef
) -> RolloutFinished:
    return msgspec.structs.replace(
        answer(0),
        answer=written,
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


class Session:
    """The files of a session with successive coordinators."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.spec = SessionSpec(
            name=folder.name,
            folder=str(folder / "session"),
            runs=str(folder / "runs"),
            flight=str(folder / "flight"),
            redis_url=redis_url,
        )
        self._run = folder / "run"
        self.answer = AnswerFiles(self._run).writer("1.0").append(written_answer([7]))
        for part in ("train", "eval"):
            rows = [Prompt(tokens=(1, 2), answer="7", row={}) for _ in range(_PROMPTS)]
            Prompts.write(prompts_file(self._run, part), rows)

    def coordinator(self) -> Coordinator:
        made = Coordinator(self.spec)
        made.committer.preparations.begin = lambda command, folder: None  # prompts were issued
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
            JobPrepared(job=JOB, prepared=Prepared(train_prompts=_PROMPTS, eval_prompts=_PROMPTS)),
        ]


async def post(coordinator: Coordinator, events: Sequence[AnyEvent]) -> None:
    for event in events:
        await coordinator.effects.post(event)


async def consume(coordinator: Coordinator) -> None:
    await coordinator.committer.consume(await coordinator.committer.consumer.read(100, None))


async def end(coordinator: Coordinator) -> None:
    await close_coordinator(coordinator)
    serve_runs([])


def unfinished(state: RunState) -> set[int]:
    assert state.batch is not None
    return {p for p, group in state.batch.groups.items() if group.members[0].finished is None}


@pytest.mark.parametrize("memory", ["kept", "lost"])
async def test_counts_unread_answers_of_lost_workers(
    redis_url: str, tmp_path: Path, memory: str
) -> None:
    """Their prompts were acknowledged with the answers, so no other worker receives them."""
    session = Session(tmp_path, redis_url)
    first = session.coordinator()
    await first.recover()
    await post(first, session.begin())
    await consume(first)
    counted, *unread = (evaluated(prompt, W0, 1, session.answer) for prompt in range(4))
    await post(first, [counted])
    await consume(first)
    last = evaluated(4, W1, 2, session.answer)
    # joined and was lost between two coordinators
    later = WorkerJoined(info=_info(W1, 3))
    await post(first, [*unread, last, _idled(last), later])
    await end(first)
    if memory == "lost":
        shutil.rmtree(session.spec.flight)

    second = session.coordinator()
    await second.recover()
    state = second.deciders.runs.states[JOB].state
    left = await second.committer.consumer.read(100, None)
    assert await second.effects.events.pending("coordinator", "coordinator") == []
    await end(second)
    assert unfinished(state) == {5, 6, 7}
    assert (state.workers, state.returning_workers, state.losses, left) == ({}, frozenset(), 0, [])


def test_treats_a_later_or_missing_incarnation_number_as_a_loss() -> None:
    workers = {W0: _info(W0, 4), W1: _info(W1, 5)}
    assert lost_workers(workers, {}, {W0: _beat(4), W1: _beat(4)}) == []
    for beats in ({W0: _beat(4)}, {W0: _beat(4), W1: _beat(0)}, {W0: _beat(4), W1: _beat(6)}):
        (lost,) = lost_workers(workers, {}, beats)
        assert (lost.worker, lost.incarnation, lost.with_session) == (W1, 5, True)


def test_leaves_a_loss_to_the_worker_that_reports_it() -> None:
    (over,) = lost_workers({W0: _info(W0, 4)}, {}, {W0: _beat(5)})
    reported = msgspec.structs.replace(
        over, reason="a rank died", returning=True, with_session=False
    )
    assert unreported([over], [Entry(EntryId("1-1"), reported)]) == []
    earlier = msgspec.structs.replace(reported, incarnation=Incarnation(3))
    assert unreported([over], [Entry(EntryId("1-1"), earlier)]) == [over]


def test_does_not_await_a_worker_whose_session_ended() -> None:
    run = decider.new_run(JOB, SPEC)
    lost = WorkerLost(worker=W1, incarnation=Incarnation(5), reason="a rank died", returning=True)
    for event in (WorkerJoined(info=_info(W1, 5)), lost):
        run, _ = decider.decide(run, event, 0.0)
    assert run.returning_workers == {W1}
    awaited = {W1: Incarnation(5)}
    assert lost_workers({}, awaited, {W1: _beat(6)}) == []
    (event,) = lost_workers({}, awaited, {})
    run, _ = decider.decide(run, event, 0.0)
    assert (run.returning_workers, run.losses) == (frozenset(), 1)


def test_drops_an_answer_lost_with_its_machine(tmp_path: Path) -> None:
    answers = AnswerFiles(tmp_path)
    whole = msgspec.structs.replace(
        answer(0), answer=answers.writer("3.0").append(written_answer([7]))
    )
    assert drop_if_lost(whole, answers) is whole
    with open(answers.folder / "3.0", "r+b") as file:
        file.truncate(whole.answer.bytes - 1)
    dropped = drop_if_lost(whole, answers)
    assert isinstance(dropped, RolloutDropped)
    assert (dropped.prompt, dropped.member) == (whole.prompt, whole.member)
    assert "are not the answer" in dropped.reason
