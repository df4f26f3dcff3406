"""Answers and idlers are heard as they come; what cannot be read, or is gone, is passed over."""

import asyncio

from tests.samples import JOB
from tests.waiting import wait_until
from tlt.actors.hearsay import overhear
from tlt.actors.life import cancel_all
from tlt.messages import AnyEvent, JobCancelRequested, RolloutFinished, Tensor, WorkerIdled
from tlt.store.codec import Codec
from tlt.store.connection import Connection
from tlt.store.keys import Keys
from tlt.store.stream import Stream
from tlt.types import Attempt, Epoch, Incarnation, Member, PromptIndex, Step, WorkerId

ORIGIN = {
    "job": JOB,
    "epoch": Epoch(1),
    "step": Step(0),
    "attempt": Attempt(0),
    "worker": WorkerId("w1"),
    "incarnation": Incarnation(3),
    "purpose": "train",
}


def answer(member: int) -> RolloutFinished:
    return RolloutFinished(
        **ORIGIN,  # pyright: ignore
        prompt=PromptIndex(4),
        member=Member(member),
        prompt_tokens=(5, 6),
        tokens=Tensor(dtype="int32", shape=(1,), data=b"\x07\0\0\0"),
        logprobs=Tensor(dtype="float32", shape=(1,), data=b"\0\0\0\0"),
        text="7",
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        policies=(),
        drafters=(),
        origins=(),
        batches=(),
        decode_seconds=0.1,
        stop="stop",
    )


async def test_answers_and_idlers_are_heard_and_nothing_else(
    connection: Connection, keys: Keys
) -> None:
    events = Stream(connection, keys.events, Codec[AnyEvent](AnyEvent))
    heard: list[RolloutFinished | WorkerIdled] = []
    listening = asyncio.create_task(overhear(events, heard.append))

    async def say(event: AnyEvent) -> None:
        async with connection.pipeline(transaction=True) as transaction:
            events.add(transaction, event)
            await transaction.execute()

    async def is_heard() -> bool:
        """It hears from the moment on that its first read has arrived."""
        await say(answer(0))
        return bool(heard)

    await wait_until(is_heard)
    heard.clear()
    idled = WorkerIdled(**ORIGIN, requeues=0)  # pyright: ignore
    await say(idled)
    await say(JobCancelRequested(job=JOB))
    await connection.xadd(keys.events, {b"not": b"an event"})
    await say(answer(1))
    await say(answer(2))
    await wait_until(lambda: answer(2) in heard)
    assert [event for event in heard if event != answer(0)] == [idled, answer(1), answer(2)]
    await cancel_all([listening])
    await connection.delete(keys.events)
