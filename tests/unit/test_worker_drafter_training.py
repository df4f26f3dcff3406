"""A lesson that a worker has said to be over does not begin again."""

import asyncio
from typing import Any

import msgspec

from tests.samples import JOB, SPEC, rolls
from tlt.actors.cancellation import cancel_all
from tlt.actors.drafter_training import DrafterTraining
from tlt.config import DrafterSpec, SpeculationSpec
from tlt.ids import Attempt, DrafterVersion, Epoch, Incarnation, Step, WorkerId
from tlt.protocol.commands import OpenJob, StopDrafterTraining, TrainDrafter
from tlt.protocol.events import WorkerIdled
from tlt.protocol.refs import DrafterBase
from tlt.ranks.worker_channel import Dismiss, Dismissed, PartialAnswers, School, SharePartialAnswers
from tlt.store.redis_keys import Keys

_WORKER, _INCARNATION = WorkerId("w0"), Incarnation(1)


class _Rank:
    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.asked_to_share = asyncio.Semaphore(0)

    def send(self, frame: Any) -> None:
        self.sent.append(frame)
        if isinstance(frame, SharePartialAnswers):
            self.asked_to_share.release()


def _train(training_session: int, version: int) -> TrainDrafter:
    return TrainDrafter(
        worker=_WORKER,
        incarnation=_INCARNATION,
        job=JOB,
        step=Step(0),
        training_session=training_session,
        base=DrafterBase(
            version=DrafterVersion(version),
            root=DrafterVersion(0),
            weights=None,
            updates=0,
            micro_batches=0,
        ),
    )


def _dismissed(training_session: int) -> Dismissed:
    return Dismissed(
        job=JOB,
        training_session=training_session,
        seconds=0.0,
        dropped_seconds=0.0,
        typical_seconds=0.1,
    )


def _opened(ranks: list[_Rank]) -> DrafterTraining:
    school = DrafterTraining(None, Keys("test"), _WORKER, _INCARNATION, ranks)  # type: ignore[arg-type]
    spec = msgspec.structs.replace(
        SPEC,
        speculation=SpeculationSpec(mode="adaptive"),
        drafter=DrafterSpec(train="always"),
    )
    school.open(
        OpenJob(
            worker=_WORKER,
            incarnation=_INCARNATION,
            job=JOB,
            epoch=Epoch(1),
            spec=spec,
            folder="/runs",
        )
    )
    return school


async def test_who_idles_is_shared_with_until_the_round_is_over() -> None:
    """Also when there was nothing to share at first, and when it was heard of early."""
    rank = _Rank()
    school = _opened([rank])
    sharing = asyncio.create_task(school.share())
    idles = WorkerIdled(
        job=JOB,
        epoch=Epoch(1),
        step=Step(0),
        attempt=Attempt(0),
        worker=WorkerId("w1"),
        incarnation=Incarnation(1),
        purpose="train",
        requeues=0,
    )
    school.somebody_idles(idles)
    school.decodes(rolls(0))
    await school.grew(PartialAnswers(job=JOB, answers=()))
    async with asyncio.timeout(30):
        for _ in range(3):
            await rank.asked_to_share.acquire()
    school.decodes(rolls(1))
    assert not school._wanted.is_set()
    await cancel_all([sharing])


async def test_a_lesson_ends_once() -> None:
    """Its ranks had nothing to learn from, and a new trunk was on its way to them."""
    ranks = [_Rank(), _Rank()]
    school = _opened(ranks)
    school.begin(_train(training_session=1, version=0))
    assert school.dismissed(0, _dismissed(1)) is None
    assert [school.busy(rank) for rank in (0, 1)] == [False, True]
    school.begin(_train(training_session=1, version=1))
    said = school.dismissed(1, _dismissed(1))
    assert said is not None
    assert said.training_session == 1
    school.begin(_train(training_session=1, version=2))
    assert not school.trains
    school.preempt(
        StopDrafterTraining(worker=_WORKER, incarnation=_INCARNATION, job=JOB, training_session=1)
    )
    assert [type(frame) for frame in ranks[0].sent] == [School, School]
    school.begin(_train(training_session=2, version=2))
    assert school.trains
    school.preempt(
        StopDrafterTraining(worker=_WORKER, incarnation=_INCARNATION, job=JOB, training_session=2)
    )
    assert isinstance(ranks[1].sent[-1], Dismiss)
