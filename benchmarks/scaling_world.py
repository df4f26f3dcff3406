"""Simulated workers of a session whose Redis and coordinator are real.

A worker is what `tlt/actors` runs without ranks: it takes prompts by `PromptIntake`, sends events
by `Outbox`, reads its own stream of commands and obeys each at once. All workers, and a scorer that
scores at once, live in one process.
"""

import asyncio
import random
import time
from collections import deque
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.command_latencies import Latencies, TimedOutbox
from tlt.actors.run_until_one_fails import cancel_all
from tlt.actors.worker.message_router import COMMAND_BLOCK_MS
from tlt.actors.worker.peer_answers import READS_A_SECOND, read_newest
from tlt.actors.worker.prompt_intake import PromptIntake
from tlt.actors.worker.worker_context import IncarnationSetup
from tlt.base.id_types import Digest, Incarnation, PolicyVersion, WorkerId
from tlt.base.strategies import Draft
from tlt.blobs.answer_files import Answer, AnswerFiles
from tlt.protocol.commands import (
    OpenJob,
    PromptIssued,
    StartRollout,
    StopDrafterTraining,
    TrainDrafter,
    UpdatePolicy,
    WorkerCommand,
)
from tlt.protocol.events import (
    AnyEvent,
    CheckpointCommitted,
    DecodingReported,
    DrafterTrainingStopped,
    PolicyPublished,
    PolicyUpdateFinished,
    RolloutFinished,
    RolloutScored,
    WorkerJoined,
)
from tlt.protocol.rank_messages import DecodePrompts, ToRank
from tlt.protocol.refs import (
    AcceptedCounts,
    BatchSpan,
    BlobRef,
    Checkpoint,
    DrafterSpan,
    PolicyRef,
    PolicySpan,
)
from tlt.protocol.shared_values import Heartbeat, StrategyTally, WorkerInfo
from tlt.store import worker_fence
from tlt.store.message_codec import Codec
from tlt.store.redis_connection import Connection, connect
from tlt.store.redis_keys import REWARD, Keys
from tlt.store.redis_stream import Consumer, Stream, read_pages

TOKENS = 32
# answers of a worker for each of its reports of decoding
_ANSWERS_A_REPORT = 4
_HEARTBEAT_SECONDS, _MOST_BEATS_A_SECOND = 0.5, 512
_pack = msgspec.msgpack.Encoder().encode
_events = Codec[AnyEvent](AnyEvent)
_commands = Codec[WorkerCommand](WorkerCommand)


class _Rank:
    """Takes the prompts that `PromptIntake` hands out."""

    def __init__(self) -> None:
        self.prompts: deque[PromptIssued] = deque()
        self.filled = asyncio.Event()

    def send(self, message: ToRank) -> None:
        if isinstance(message, DecodePrompts):
            self.prompts.extend(message.prompts)
            self.filled.set()


class World:
    """The workers, and what they share."""

    def new_worker(self, number: int) -> "SimulatedWorker":
        return SimulatedWorker(self, number)

    def __init__(self, redis_url: str, session: str, answers: AnswerFiles) -> None:
        self.connection = connect(redis_url)
        self.keys = Keys(session)
        self.answers = answers
        self.latencies = Latencies()
        # seconds between two answers of a worker; 0: all that it holds at once
        self.pace = 0.0
        # cleared while no worker decodes
        self.decoding = asyncio.Event()
        self.decoding.set()
        self.workers: list[SimulatedWorker] = []
        self.updates = 0
        self._redis_url = redis_url
        self._tasks: list[asyncio.Task[None]] = []

    def connect(self) -> Connection:
        return connect(self._redis_url)

    def start(self, *works: Coroutine[Any, Any, None]) -> None:
        self._tasks += [asyncio.create_task(work) for work in works]

    async def join(self, workers: int) -> None:
        """Start so many workers, and wait until all have a connection for their commands."""
        first = len(self.workers)
        self.workers += [self.new_worker(n) for n in range(first, first + workers)]
        for worker in self.workers[first:]:
            await worker.join()

    @property
    def heartbeat_seconds(self) -> float:
        """Return a session's, or more where the simulation would do little else."""
        return max(_HEARTBEAT_SECONDS, len(self.workers) / _MOST_BEATS_A_SECOND)

    @property
    def held(self) -> int:
        """Return the prompts that workers have taken and not answered."""
        return sum(worker.held for worker in self.workers)

    def check(self) -> None:
        """Raise what has ended a task."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def end(self) -> None:
        await cancel_all(self._tasks)
        for worker in self.workers:
            await worker.end()
        await self.connection.aclose()

    async def score(self) -> None:
        """Score each answer as soon as it is read, as the reward's process does."""
        connection = self.connect()
        events = Stream(connection, self.keys.events, _events)
        await events.ensure_group(REWARD)
        consumer = Consumer(events, REWARD, "reward")
        while True:
            entries = await consumer.read(256, 500)
            ids = [entry.id for entry in entries]
            async with connection.pipeline(transaction=True) as transaction:
                for entry in entries:
                    self.latencies.note_stored(entry.message, entry.id)
                    if isinstance(entry.message, RolloutFinished):
                        score = _scored(entry.message)
                        events.add(transaction, score)
                        self.latencies.note(score)
                consumer.acknowledge(transaction, ids)
                await transaction.execute()
            consumer.forget(ids)


class SimulatedWorker:
    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self._setup = IncarnationSetup(
            connection=world.connect(),
            keys=world.keys,
            worker=WorkerId(f"w{number}"),
            incarnation=Incarnation(number + 1),
        )
        self._rank = _Rank()
        self._setup.ranks.append(self._rank)  # pyright: ignore[reportArgumentType]
        self._outbox = TimedOutbox(self._setup, world.latencies)
        self._intake = PromptIntake(self._setup, self._outbox)
        self._answers = world.answers.writer(f"{number + 1}.0")
        self._dice = random.Random(number)
        self._beats = self._reports = 0
        self.info = WorkerInfo(
            worker=self._setup.worker,
            incarnation=self._setup.incarnation,
            ranks=1,
            host="host",
            rendezvous="127.0.0.1:1",
        )

    @property
    def held(self) -> int:
        return len(self._rank.prompts)

    async def join(self) -> None:
        await worker_fence.admit(self._setup.fence)
        self._world.start(
            self._follow_commands(),
            self._follow_peers(),
            self._outbox.run(),
            self._intake.pull(),
            self._intake.wake(),
            self._decode(),
            self._beat(),
        )
        self._outbox.post(WorkerJoined(info=self.info))

    async def end(self) -> None:
        await self._intake.end()
        await self._setup.connection.aclose()

    async def _beat(self) -> None:
        setup, world = self._setup, self._world
        # workers of a cluster don't beat at the same time
        await asyncio.sleep(self._dice.random() * world.heartbeat_seconds)
        while True:
            self._beats += 1
            beat = Heartbeat(
                incarnation=setup.incarnation,
                counter=self._beats,
                progress=self._beats,
                running=len(self._rank.prompts),
                pid=1,
                rank_pids=(2,),
                job=None,
                resident_bytes=0,
                start_ticks=0,
                sent_at=time.time(),
            )
            await setup.connection.hset(world.keys.heartbeats, setup.worker, _pack(beat))
            await asyncio.sleep(world.heartbeat_seconds)

    async def _follow_commands(self) -> None:
        setup = self._setup
        key = setup.keys.commands(setup.worker, setup.incarnation)
        async for page in read_pages(
            setup.connection, key, after="0", count=10, block_ms=COMMAND_BLOCK_MS
        ):
            for id_, fields in page:
                command = _commands.decode(fields)
                self._world.latencies.read(command, id_)
                self._obey(command)
                await setup.connection.xdel(key, id_)

    async def _follow_peers(self) -> None:
        """Read others' events, but don't decode them: workers do that on cores of their own."""
        after = "$"
        while True:
            if page := await read_newest(self._outbox.events, after):
                after = page[-1][0].decode()
                await asyncio.sleep(len(self._world.workers) / READS_A_SECOND)

    def _obey(self, command: WorkerCommand) -> None:
        match command:
            case OpenJob():
                self._outbox.open(command.job, Path(command.folder))
                self._intake.open(command)
            case StartRollout():
                self._intake.start(command)
            case TrainDrafter():
                self._intake.stop()
            case StopDrafterTraining():
                self._outbox.post(
                    DrafterTrainingStopped(
                        job=command.job,
                        worker=command.worker,
                        incarnation=command.incarnation,
                        training_session=command.training_session,
                        dropped_seconds=0.0,
                        median_seconds=0.05,
                    )
                )
            case UpdatePolicy():
                self._intake.stop()
                self._update(command)
            case _:
                pass

    def _update(self, command: UpdatePolicy) -> None:
        version = PolicyVersion(command.version + 1)
        origin: dict[str, Any] = {
            "job": command.job,
            "epoch": command.epoch,
            "step": command.step,
            "attempt": command.attempt,
        }
        if command.first_rank == 0:
            self._world.updates += 1
            weights = BlobRef(digest=Digest(f"weights-{version}"), bytes=1)
            if command.checkpoint:
                saved = Checkpoint(
                    version=version,
                    weights=weights,
                    optimiser=BlobRef(digest=Digest(f"optimiser-{version}"), bytes=1),
                )
                self._outbox.post(CheckpointCommitted(**origin, checkpoint=saved))
            policy = PolicyRef(version=version, weights=weights)
            self._outbox.post(PolicyPublished(**origin, policy=policy, metrics=None))
        self._outbox.post(
            PolicyUpdateFinished(
                **origin,
                worker=command.worker,
                incarnation=command.incarnation,
                version=version,
            )
        )

    async def _decode(self) -> None:
        """Finish prompts one after the other at the world's pace, or all that are held at once."""
        finished = 0
        while True:
            await self._rank.filled.wait()
            await self._world.decoding.wait()
            if self._world.pace > 0:
                await asyncio.sleep(self._dice.expovariate(1.0 / self._world.pace))
            while self._rank.prompts:
                finished += 1
                self._finish(self._rank.prompts.popleft(), finished)
                if self._world.pace > 0:
                    break
            if not self._rank.prompts:
                self._rank.filled.clear()

    def _finish(self, prompt: PromptIssued, count: int) -> None:
        if count % _ANSWERS_A_REPORT == 0:
            self._reports += 1
            self._outbox.post(self._report(prompt))
        event = RolloutFinished(
            **place(prompt),
            worker=self._setup.worker,
            incarnation=self._setup.incarnation,
            answer=self._answers.append(ANSWER),
            length=TOKENS,
            accepted=(AcceptedCounts(drafter=None, steps=(8, 4, 2)),),
            batch=1,
            decode_seconds=1.0,
            stop="stop",
            prompt_length=len(prompt.tokens),
        )
        taken = self._intake.finish(event)
        assert taken is not None, "the worker has the prompt"
        self._outbox.post(event, taken)

    def _report(self, prompt: PromptIssued) -> DecodingReported:
        tally = StrategyTally(
            strategy=Draft(depth=4),
            bucket=8,
            drafter=None,
            control=None,
            steps=10,
            explored=1,
            rows=80,
            tokens=200,
            seconds=1.0,
            work=1.0,
            overhead=0.01,
            expected=200.0,
        )
        return DecodingReported(
            job=prompt.job,
            worker=self._setup.worker,
            incarnation=self._setup.incarnation,
            rank=0,
            serial=self._reports,
            step=prompt.step,
            purpose=prompt.purpose,
            tallies=(tally,),
        )


ANSWER = Answer(
    prompt=(1, 2, 3, 4),
    token_bytes=bytes(4 * TOKENS),
    logprob_bytes=bytes(4 * TOKENS),
    text="word " * TOKENS,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    policies=(PolicySpan(version=PolicyVersion(0), tokens=TOKENS),),
    drafters=(DrafterSpan(version=None, tokens=TOKENS),),
    origin_bytes=b"\0" * TOKENS,
    batches=(BatchSpan(size=1, tokens=TOKENS),),
)


def place(prompt: PromptIssued | RolloutFinished) -> dict[str, Any]:
    return {
        name: getattr(prompt, name)
        for name in ("job", "epoch", "step", "attempt", "purpose", "prompt", "member")
    }


def _scored(done: RolloutFinished) -> RolloutScored:
    # the members of a group differ, so that all are trained on
    return RolloutScored(**place(done), length=done.length, reward=float(done.member % 2))
