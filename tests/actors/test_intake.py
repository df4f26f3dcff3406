"""A worker takes its part, and no more while that is in hand; it idles when nothing is left."""

import asyncio
from typing import Any

import msgspec

from tests.samples import JOB, SPEC, answer, prompt
from tests.waiting import wait_until
from tlt.actors.ending import cancel_all
from tlt.actors.intake import Intake
from tlt.messages import OpenJob, PolicyRef, PromptIssued, StartRollout
from tlt.ranks.frames import Decode
from tlt.store.codec import Codec
from tlt.store.connection import Connection
from tlt.store.keys import ROLLOUT, Keys
from tlt.store.stream import Stream
from tlt.types import Epoch, Incarnation, Member, PolicyVersion, Step, WorkerId

_WHO = {"worker": WorkerId("w0"), "incarnation": Incarnation(1)}
# of the prompt that samples answer
_PROMPT = 4


class _Rank:
    """Remembers what it was given."""

    def __init__(self) -> None:
        self.members: list[Member] = []

    def send(self, frame: Any) -> None:
        assert isinstance(frame, Decode)
        self.members += [given.member for given in frame.prompts]


def _rolls(share: int) -> StartRollout:
    return StartRollout(
        **_WHO,  # pyright: ignore
        job=JOB,
        epoch=Epoch(1),
        step=Step(0),
        purpose="train",
        policy=PolicyRef(version=PolicyVersion(0), weights=None),
        drafter=None,
        requeues=0,
        share=share,
    )


async def _issue(connection: Connection, keys: Keys, members: int) -> None:
    queue = Stream(connection, keys.prompts(JOB), Codec[PromptIssued](PromptIssued))
    async with connection.pipeline(transaction=True) as transaction:
        for member in range(members):
            queue.add(transaction, prompt(_PROMPT, member=member))
        await transaction.execute()
    await queue.ensure_group(ROLLOUT)


async def test_a_part_is_in_hand_until_nothing_is_left(connection: Connection, keys: Keys) -> None:
    await _issue(connection, keys, members=5)
    ranks, idled = [_Rank(), _Rank()], list[StartRollout]()
    intake = Intake(connection, keys, Incarnation(1), ranks, idled.append)  # type: ignore[arg-type]
    spec = msgspec.structs.replace(SPEC, rollout=msgspec.structs.replace(SPEC.rollout, slots=2))
    intake.open(OpenJob(**_WHO, job=JOB, epoch=Epoch(1), spec=spec, folder="/runs"))  # pyright: ignore
    running = [asyncio.create_task(task) for task in (intake.pull(), intake.wake())]

    def given() -> list[int]:
        return sorted(member for rank in ranks for member in rank.members)

    intake.start(_rolls(share=2))
    await wait_until(lambda: len(given()) >= 2)
    # neighbours are spread over the ranks
    assert [len(rank.members) for rank in ranks] == [1, 1]
    assert intake.busy == {0, 1}
    taken = intake.finished(answer(given()[0]))
    assert taken is not None
    assert intake.finished(answer(given()[0])) is None
    await wait_until(lambda: len(given()) >= 3)
    assert given() == [0, 1, 2], "more than its part was taken"
    # another worker is lost: its part is ours, as far as there are slots
    intake.start(_rolls(share=5))
    await wait_until(lambda: len(given()) >= 5)
    for member in range(1, 5):
        assert not idled
        assert intake.finished(answer(member)) is not None
    await wait_until(lambda: idled)
    assert idled == [_rolls(share=5)]
    assert not intake.busy
    await cancel_all(running)
    await intake.end()
    await connection.delete(keys.prompts(JOB))
