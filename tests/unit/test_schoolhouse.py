"""A lesson that a worker has said to be over does not begin again."""

from typing import Any

from tests.samples import JOB, SPEC
from tlt.actors.schoolhouse import Schoolhouse
from tlt.messages import OpenJob, PolicyRef, PreemptDrafter, TrainDrafter, TrunkRef
from tlt.ranks.frames import Dismiss, Dismissed, School
from tlt.store.keys import Keys
from tlt.types import DrafterVersion, Epoch, Incarnation, PolicyVersion, Step, WorkerId

_WORKER, _INCARNATION = WorkerId("w0"), Incarnation(1)


class _Rank:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, frame: Any) -> None:
        self.sent.append(frame)


def _train(lesson: int, version: int) -> TrainDrafter:
    return TrainDrafter(
        worker=_WORKER,
        incarnation=_INCARNATION,
        job=JOB,
        step=Step(0),
        lesson=lesson,
        trunk=TrunkRef(
            version=DrafterVersion(version),
            root=DrafterVersion(0),
            weights=None,
            updates=0,
            lessons=0,
        ),
        policy=PolicyRef(version=PolicyVersion(0), weights=None),
    )


def _dismissed(lesson: int) -> Dismissed:
    return Dismissed(job=JOB, lesson=lesson, seconds=0.0, dropped_seconds=0.0, typical_seconds=0.1)


async def test_a_lesson_ends_once() -> None:
    """Its ranks had nothing to learn from, and a new trunk was on its way to them."""
    ranks = [_Rank(), _Rank()]
    school = Schoolhouse(None, Keys("test"), _WORKER, _INCARNATION, ranks)  # type: ignore[arg-type]
    school.open(
        OpenJob(
            worker=_WORKER,
            incarnation=_INCARNATION,
            job=JOB,
            epoch=Epoch(1),
            spec=SPEC,
            folder="/runs",
        )
    )
    school.begin(_train(lesson=1, version=0))
    assert school.dismissed(0, _dismissed(1)) is None
    school.begin(_train(lesson=1, version=1))
    said = school.dismissed(1, _dismissed(1))
    assert said is not None
    assert said.lesson == 1
    school.begin(_train(lesson=1, version=2))
    assert not school.trains
    school.preempt(PreemptDrafter(worker=_WORKER, incarnation=_INCARNATION, job=JOB, lesson=1))
    assert [type(frame) for frame in ranks[0].sent] == [School, School]
    school.begin(_train(lesson=2, version=2))
    assert school.trains
    school.preempt(PreemptDrafter(worker=_WORKER, incarnation=_INCARNATION, job=JOB, lesson=2))
    assert isinstance(ranks[1].sent[-1], Dismiss)
