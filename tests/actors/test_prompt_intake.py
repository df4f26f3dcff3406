"""A worker leaves other workers time to take their share, and idles when nothing is left."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import msgspec
import pytest

from tests.samples import JOB, SPEC, answer, prompt, rolls
from tests.waiting import wait_until
from tlt.actors.run_until_one_fails import cancel_all
from tlt.actors.worker.conversations import Conversations
from tlt.actors.worker.prompt_intake import PromptIntake
from tlt.actors.worker.rank_process import RankProcess
from tlt.actors.worker.worker_context import IncarnationSetup
from tlt.base.id_types import Epoch, Incarnation, JobId, Member, Step, WorkerId
from tlt.protocol.commands import OpenJob, PromptIssued
from tlt.protocol.events import SizesChosen, WorkerIdled
from tlt.protocol.rank_messages import DecodePrompts
from tlt.protocol.refs import SCHEMA_VERSION
from tlt.protocol.shared_values import ChosenSizes
from tlt.spec.environment import EnvironmentSpec
from tlt.store.message_codec import Codec
from tlt.store.redis_connection import Connection
from tlt.store.redis_keys import ROLLOUT, Keys
from tlt.store.redis_stream import Stream

_WHO = {"worker": WorkerId("w0"), "incarnation": Incarnation(1)}
# the prompt that `tests.samples.answer` answers
_PROMPT = 4


class _Rank:
    """A rank that records its commands."""

    def __init__(self) -> None:
        self.members: list[Member] = []

    def send(self, message: Any) -> None:
        assert isinstance(message, DecodePrompts)
        self.members += [given.member for given in message.prompts]


async def _issue(connection: Connection, keys: Keys, members: int) -> None:
    queue = Stream(connection, keys.prompts(JOB), Codec[PromptIssued](PromptIssued))
    async with connection.pipeline(transaction=True) as transaction:
        for member in range(members):
            queue.add(transaction, prompt(_PROMPT, member=member))
        await transaction.execute()
    await queue.ensure_group(ROLLOUT)


class _Worker:
    """A worker with two engines of `slots` each, which `width` ranks share."""

    def __init__(
        self,
        connection: Connection,
        keys: Keys,
        share_seconds: float,
        width: int,
        slots: int | Literal["auto"],
        defer_long: float,
        environment: EnvironmentSpec | msgspec.UnsetType,
    ) -> None:
        self.ranks = [_Rank() for _ in range(2 * width)]
        self.idled: list[WorkerIdled] = []
        setup = IncarnationSetup(
            connection=connection,
            keys=keys,
            **_WHO,  # pyright: ignore
            ranks=self.ranks,  # type: ignore[arg-type]
        )
        self.intake = PromptIntake(setup, self, share_seconds)  # type: ignore[arg-type]
        rollout = msgspec.structs.replace(
            SPEC.rollout,
            slots=slots,
            engine="sglang",
            tensor_parallel=width,
            defer_long=defer_long,
        )
        spec = msgspec.structs.replace(SPEC, rollout=rollout, environment=environment)
        self.intake.open(
            OpenJob(**_WHO, job=JOB, epoch=Epoch(1), spec=spec, folder="/runs")  # pyright: ignore
        )

    def post(self, event: WorkerIdled) -> None:
        self.idled.append(event)

    @property
    def given(self) -> list[int]:
        return sorted(member for rank in self.ranks for member in rank.members)


@asynccontextmanager
async def _worker(
    connection: Connection,
    keys: Keys,
    *,
    prompts: int,
    share_seconds: float,
    width: int = 1,
    slots: int | Literal["auto"] = 2,
    defer_long: float = 0.0,
    environment: EnvironmentSpec | msgspec.UnsetType = msgspec.UNSET,
) -> AsyncIterator[_Worker]:
    await _issue(connection, keys, prompts)
    worker = _Worker(connection, keys, share_seconds, width, slots, defer_long, environment)
    running = [asyncio.create_task(t) for t in (worker.intake.pull(), worker.intake.wake())]
    try:
        yield worker
    finally:
        await cancel_all(running)
        await worker.intake.end()
        await connection.delete(keys.prompts(JOB))


async def test_leaves_the_others_their_share(connection: Connection, keys: Keys) -> None:
    async with _worker(connection, keys, prompts=8, share_seconds=3600.0) as worker:
        worker.intake.start(rolls(share=2))
        await wait_until(lambda: len(worker.given) >= 2)
        # consecutive prompts go to different ranks
        assert [len(rank.members) for rank in worker.ranks] == [1, 1]
        assert worker.intake.busy_ranks == {0, 1}
        assert worker.intake.finish(answer(0)) is not None
        assert worker.intake.finish(answer(0)) is None
        await wait_until(lambda: len(worker.given) >= 3)
        assert worker.given == [0, 1, 2]
        # another worker is lost, and this one takes its share into the free slots
        worker.intake.start(rolls(share=7))
        await wait_until(lambda: len(worker.given) >= 5)
        assert worker.given == [0, 1, 2, 3, 4]


async def test_waits_until_its_ranks_have_chosen_their_slots(
    connection: Connection, keys: Keys
) -> None:
    async with _worker(connection, keys, prompts=8, share_seconds=3600.0, slots="auto") as worker:
        worker.intake.start(rolls(share=8))
        await asyncio.sleep(0.2)
        assert worker.given == []
        sizes = ChosenSizes(slots=3, microbatch_tokens=64)
        for rank in range(2):
            event = SizesChosen(**_WHO, job=JOB, rank=rank, sizes=sizes, why="")  # pyright: ignore
            worker.intake.add_slots(event)
        await wait_until(lambda: len(worker.given) >= 6)
        assert worker.given == [0, 1, 2, 3, 4, 5]


async def test_takes_what_others_leave(connection: Connection, keys: Keys) -> None:
    async with _worker(connection, keys, prompts=8, share_seconds=0.05) as worker:
        worker.intake.start(rolls(share=1))
        await wait_until(lambda: len(worker.given) >= 4)
        assert worker.given == [0, 1, 2, 3]


async def test_only_ranks_with_an_engine_answer_prompts(connection: Connection, keys: Keys) -> None:
    async with _worker(connection, keys, prompts=8, share_seconds=0.05, width=2) as worker:
        worker.intake.start(rolls(share=1))
        await wait_until(lambda: len(worker.given) >= 4)
        assert [len(rank.members) for rank in worker.ranks] == [2, 0, 2, 0]
        assert worker.intake.busy_ranks == {0, 2}


async def test_takes_the_prompts_behind_unreadable_ones(connection: Connection, keys: Keys) -> None:
    foreign = msgspec.structs.replace(prompt(_PROMPT), job=JobId("other"))
    for _ in range(5):
        await connection.xadd(keys.prompts(JOB), {b"v": b"%d" % SCHEMA_VERSION, b"m": b"none"})
        await connection.xadd(keys.prompts(JOB), Codec[PromptIssued](PromptIssued).encode(foreign))
    async with _worker(connection, keys, prompts=3, share_seconds=3600.0) as worker:
        worker.intake.start(rolls(share=3))
        await wait_until(lambda: len(worker.given) == 3)
        assert worker.idled == []
        for member in range(3):
            assert worker.intake.finish(answer(member)) is not None
        await wait_until(lambda: worker.idled)
        assert await connection.xlen(keys.dead_letters) == 5
    await connection.delete(keys.dead_letters)


async def test_drops_prompts_that_an_earlier_step_ended_without(
    connection: Connection, keys: Keys
) -> None:
    """All answers of a step are of its own weights where long groups are put off."""
    later = msgspec.structs.replace(prompt(_PROMPT, member=7), step=Step(1))
    stream = Stream(connection, keys.prompts(JOB), Codec[PromptIssued](PromptIssued))
    async with _worker(connection, keys, prompts=5, share_seconds=0.0, defer_long=0.5) as worker:
        await connection.xadd(stream.key, stream.codec.encode(later))
        worker.intake.start(rolls(step=1, share=6))
        await wait_until(lambda: worker.given)
        assert worker.given == [7]
        finished = msgspec.structs.replace(answer(7), step=Step(1))
        assert worker.intake.finish(finished) is not None
        await wait_until(lambda: worker.idled)
        # only the answered one is left, which its event acknowledges
        assert len(await stream.pending(ROLLOUT, "1")) == 1


async def test_idles_once_when_nothing_is_left(connection: Connection, keys: Keys) -> None:
    async with _worker(connection, keys, prompts=3, share_seconds=3600.0) as worker:
        worker.intake.start(rolls(share=3))
        await wait_until(lambda: len(worker.given) == 3)
        for member in range(2):
            assert worker.intake.finish(answer(member)) is not None
        # the queue is empty, and one prompt is unanswered
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await wait_until(lambda: worker.idled)
        assert worker.intake.finish(answer(2)) is not None
        await wait_until(lambda: worker.idled)
        (idled,) = worker.idled
        command = rolls(share=3)
        assert (idled.job, idled.worker, idled.step) == (JOB, command.worker, command.step)
        assert (idled.purpose, idled.requeues) == (command.purpose, command.requeues)
        assert not worker.intake.busy_ranks


async def test_begins_one_conversation_for_a_prompt_and_no_more_than_it_may(
    connection: Connection, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All wait for their environments, so that slots are free."""
    begun: list[Member] = []

    def begin(_: Conversations, rank: RankProcess, prompt: PromptIssued) -> None:
        begun.append(prompt.member)

    monkeypatch.setattr(Conversations, "begin", begin)
    monkeypatch.setattr(Conversations, "is_waiting", lambda *_: True)
    spec = EnvironmentSpec(factory="world.py:World", most_open=3)
    async with _worker(connection, keys, prompts=2, share_seconds=0.0, environment=spec) as worker:
        worker.intake.start(rolls(share=8))
        await wait_until(lambda: len(begun) == 2)
        # the first two again, and two others
        await _issue(connection, keys, 4)
        await wait_until(lambda: len(begun) == 3)
        assert begun == [0, 1, 2]
        worker.intake.finish(answer(0))
        await wait_until(lambda: len(begun) == 4)
        assert begun == [0, 1, 2, 3]
