"""The stream of partial answers is short, and expires if it is written after its job's end."""

from typing import Any

from tests.samples import JOB, SPEC
from tlt.actors.worker.drafter_training import DrafterTraining
from tlt.actors.worker.partial_answers_to_learn_from import PartialAnswerExchange
from tlt.actors.worker.worker_context import IncarnationSetup
from tlt.base.id_types import Epoch, Incarnation, Member, PromptIndex, Step, WorkerId
from tlt.protocol.commands import OpenJob
from tlt.protocol.rank_messages import PartialAnswer, PartialAnswers
from tlt.store.redis_connection import Connection
from tlt.store.redis_keys import Keys


async def test_bounds_the_stream_in_length_and_time(connection: Connection, keys: Keys) -> None:
    who: dict[str, Any] = {"worker": WorkerId("w0"), "incarnation": Incarnation(1)}
    setup = IncarnationSetup(connection=connection, keys=keys, **who)
    exchange = PartialAnswerExchange(setup, DrafterTraining(setup))
    exchange.open(OpenJob(**who, job=JOB, epoch=Epoch(1), spec=SPEC, folder="/runs"))
    answer = PartialAnswer(
        job=JOB,
        step=Step(0),
        purpose="train",
        prompt=PromptIndex(0),
        member=Member(0),
        prompt_tokens=(1, 2),
        token_bytes=b"1234",
    )
    for _ in range(40):
        await exchange.publish(PartialAnswers(job=JOB, answers=(answer,)))
    key = keys.partial_answers(JOB)
    assert await connection.xlen(key) == 32
    assert 0 < await connection.ttl(key) <= 600
    await connection.delete(key)
