"""A worker ends each training session once, and shares partial answers with idle workers."""

import asyncio
from typing import Any

import msgspec
import pytest

from tests.samples import JOB, SPEC, rolls
from tlt.actors.run_until_one_fails import cancel_all
from tlt.actors.worker.drafter_training import DrafterTraining
from tlt.actors.worker.partial_answers_to_learn_from import PartialAnswerExchange
from tlt.actors.worker.worker_context import IncarnationSetup
from tlt.base.id_types import Attempt, DrafterVersion, Epoch, Incarnation, Step, WorkerId
from tlt.protocol.commands import OpenJob, StopDrafterTraining, TrainDrafter
from tlt.protocol.events import DrafterTrainingStopped, WorkerIdled
from tlt.protocol.rank_messages import PartialAnswers, SharePartialAnswers
from tlt.protocol.refs import DrafterBase
from tlt.spec.config import DrafterSpec, SpeculationSpec
from tlt.store.redis_keys import Keys

_WORKER, _INCARNATION = WorkerId("w0"), Incarnation(1)
_OPEN = OpenJob(
    worker=_WORKER,
    incarnation=_INCARNATION,
    job=JOB,
    epoch=Epoch(1),
    spec=msgspec.structs.replace(
        SPEC,
        speculation=SpeculationSpec(mode="adaptive"),
        drafter=DrafterSpec(train="always"),
    ),
    folder="/runs",
)


class _Rank:
    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.share_requests = asyncio.Semaphore(0)

    def send(self, message: Any) -> None:
        self.sent.append(message)
        if isinstance(message, SharePartialAnswers):
            self.share_requests.release()


def _setup(ranks: list[_Rank]) -> IncarnationSetup:
    return IncarnationSetup(
        connection=None,
        keys=Keys("test"),
        worker=_WORKER,
        incarnation=_INCARNATION,
        ranks=ranks,  # type: ignore[arg-type]
    )


def _training(ranks: list[_Rank]) -> DrafterTraining:
    training = DrafterTraining(_setup(ranks))
    training.open(_OPEN)
    return training


def _train(session: int, version: int) -> TrainDrafter:
    return TrainDrafter(
        worker=_WORKER,
        incarnation=_INCARNATION,
        job=JOB,
        step=Step(0),
        training_session=session,
        base=DrafterBase(
            version=DrafterVersion(version),
            root=DrafterVersion(0),
            weights=None,
            updates=0,
            micro_batches=0,
        ),
    )


def _stop(session: int) -> StopDrafterTraining:
    return StopDrafterTraining(
        worker=_WORKER, incarnation=_INCARNATION, job=JOB, training_session=session
    )


def _stopped(session: int, dropped: float = 0.0, typical: float = 0.1) -> DrafterTrainingStopped:
    return DrafterTrainingStopped(
        worker=_WORKER,
        incarnation=_INCARNATION,
        job=JOB,
        training_session=session,
        dropped_seconds=dropped,
        median_seconds=typical,
    )


async def test_shares_partial_answers_until_the_rollout_batch_is_over() -> None:
    """An early notice of the idle worker and no answers at first change nothing."""
    rank = _Rank()
    exchange = PartialAnswerExchange(_setup([rank]), _training([rank]))
    exchange.open(_OPEN)
    requesting = asyncio.create_task(exchange.request())
    idle = WorkerIdled(
        job=JOB,
        epoch=Epoch(1),
        step=Step(0),
        attempt=Attempt(0),
        worker=WorkerId("w1"),
        incarnation=Incarnation(1),
        purpose="train",
        requeues=0,
    )
    exchange.note_idle_worker(idle)
    exchange.start_rollout(rolls(0))
    await exchange.publish(PartialAnswers(job=JOB, answers=()))
    async with asyncio.timeout(30):
        for _ in range(3):
            await rank.share_requests.acquire()
    exchange.start_rollout(rolls(1))
    assert not exchange.is_wanted
    await cancel_all([requesting])


def test_a_training_session_ends_once() -> None:
    """The ranks have no samples, and a new base is on its way to them."""
    ranks = [_Rank(), _Rank()]
    training = _training(ranks)
    training.begin(_train(session=1, version=0))
    assert training.note_stopped(0, _stopped(1)) is None
    assert [training.is_training(rank) for rank in (0, 1)] == [False, True]
    training.begin(_train(session=1, version=1))
    event = training.note_stopped(1, _stopped(1))
    assert event is not None
    assert (event.training_session, event.seconds) == (1, 0.0)
    training.begin(_train(session=1, version=2))
    assert training.session is None
    training.stop(_stop(1))
    assert ranks[0].sent == [_train(session=1, version=0), _train(session=1, version=1)]
    training.begin(_train(session=2, version=2))
    assert training.session is not None
    training.stop(_stop(2))
    assert ranks[1].sent[-1] == _stop(2)


def test_reports_a_stop_from_the_command_to_the_last_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("tlt.actors.worker.drafter_training.time.monotonic", lambda: now)
    training = _training([_Rank(), _Rank()])
    training.begin(_train(session=1, version=0))
    training.stop(_stop(1))
    assert training.note_stopped(1, _stopped(1, dropped=0.25, typical=0.5)) is None
    now += 2.0
    event = training.note_stopped(0, _stopped(1, dropped=0.5, typical=0.125))
    assert event is not None
    assert (event.seconds, event.dropped_seconds, event.median_seconds) == (2.0, 0.75, 0.5)
