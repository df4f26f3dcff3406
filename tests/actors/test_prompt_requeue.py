"""The prompts of a lost incarnation are issued again, at most `max_tries` times."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest

from tests.samples import JOB, SPEC, prompt
from tests.store.conftest import CODEC
from tests.store.test_streams import indices, pending, put
from tlt.actors.coordinator.redis_effects import Caused, Effects
from tlt.base.id_types import Incarnation, WorkerId
from tlt.data.dataset import Prompts, prompts_file
from tlt.protocol.commands import RequeuePrompts
from tlt.protocol.events import RolloutDropped, WorkerLost
from tlt.store.redis_connection import Connection
from tlt.store.redis_keys import ROLLOUT, Keys
from tlt.store.redis_stream import Consumer

DEAD = Incarnation(7)
LOST = WorkerLost(worker=WorkerId("w"), incarnation=DEAD, reason="killed", returning=False)
WITH_SESSION = msgspec.structs.replace(LOST, with_session=True)
REQUEUE = RequeuePrompts(job=JOB, incarnation=DEAD)
PAUSED = msgspec.structs.replace(REQUEUE, excused=True)


class Run:
    """An open run, whose prompts a dead incarnation and a live one read."""

    def __init__(self, effects: Effects) -> None:
        self.effects = effects
        (self.stream,) = effects.prompt_streams(JOB)
        self.live = Consumer(self.stream, ROLLOUT, "8")

    async def hand_out(self, count: int) -> None:
        """Let the dead incarnation read prompts."""
        await Consumer(self.stream, ROLLOUT, str(DEAD)).read(count, 1)

    async def requeue(self, command: RequeuePrompts = REQUEUE, event: WorkerLost = LOST) -> None:
        async with self.stream.connection.pipeline(transaction=True) as transaction:
            await self.effects.fill(transaction, [Caused(command, event, JOB)])
            await transaction.execute()

    async def dropped(self) -> list[RolloutDropped]:
        entries = await self.stream.connection.xrange(self.effects.events.key)
        events = [self.effects.events.codec.decode(fields) for _, fields in entries]
        return [event for event in events if isinstance(event, RolloutDropped)]

    async def dead_letters(self) -> list[dict[bytes, bytes]]:
        letters = await self.stream.connection.xrange(self.effects.keys.dead_letters)
        return [fields for _, fields in letters]


@pytest.fixture
async def run(connection: Connection, keys: Keys, tmp_path: Path) -> AsyncIterator[Run]:
    effects = Effects(connection, keys)
    for part in ("train", "eval"):
        Prompts.write(prompts_file(tmp_path, part), [])
    rollout = msgspec.structs.replace(SPEC.rollout, max_tries=2)
    await effects.open_run(JOB, msgspec.structs.replace(SPEC, rollout=rollout), tmp_path)
    yield Run(effects)
    effects.close_run(JOB)


@pytest.mark.parametrize("count", [2, 501])
async def test_requeues_prompts_of_a_dead_worker_at_the_end(count: int, run: Run) -> None:
    await put(run.stream, *range(count + 1))
    await run.hand_out(count)
    await run.requeue()
    assert await pending(run.stream) == 0
    entries = await run.live.read(count + 1, 10)
    assert indices(entries) == [count, *range(count)]
    assert [entry.message.attempt for entry in entries] == [0] + [1] * count
    assert msgspec.structs.replace(entries[1].message, attempt=0) == prompt(0)


async def test_gives_a_prompt_up_after_max_tries(run: Run) -> None:
    await put(run.stream, 7)
    for given_up in ([], [7], [7]):
        await run.hand_out(10)
        await run.requeue()
        assert [event.prompt for event in await run.dropped()] == given_up
    assert await pending(run.stream) == 0
    (letter,) = await run.dead_letters()
    assert CODEC.decode(letter) == prompt(7, attempt=1)
    assert letter[b"error"] == b"its worker was lost 2 times"
    assert letter[b"source"] == run.stream.key.encode()


@pytest.mark.parametrize("excuse", [(PAUSED, LOST), (REQUEUE, WITH_SESSION)])
async def test_a_pause_and_a_loss_with_the_whole_session_are_no_tries(
    excuse: tuple[RequeuePrompts, WorkerLost], run: Run
) -> None:
    await put(run.stream, 7)
    losses: Sequence[tuple[RequeuePrompts, WorkerLost]] = [excuse, (REQUEUE, LOST), excuse, excuse]
    for command, event in losses:
        await run.hand_out(10)
        await run.requeue(command, event)
        assert await run.dropped() == []
    await run.hand_out(10)
    await run.requeue()
    assert [event.prompt for event in await run.dropped()] == [7]


async def test_requeues_nothing_without_its_transaction(run: Run) -> None:
    await put(run.stream, 1)
    await run.hand_out(10)
    async with run.stream.connection.pipeline(transaction=True) as transaction:
        await run.effects.fill(transaction, [Caused(REQUEUE, LOST, JOB)])
    assert await pending(run.stream) == 1
    assert await run.stream.connection.xlen(run.stream.key) == 1


async def test_moves_unreadable_entries_of_a_dead_worker_to_the_dead_letters(run: Run) -> None:
    await run.stream.connection.xadd(run.stream.key, {b"v": b"\xff", b"m": b""})
    await put(run.stream, 1)
    await run.hand_out(10)
    await run.requeue()
    assert len(await run.dead_letters()) == 1
    assert await pending(run.stream) == 0
    assert indices(await run.live.read(10, 10)) == [1]
