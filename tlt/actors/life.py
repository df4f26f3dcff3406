"""One life of a worker: fresh ranks, what they are given and what they say, until one of them ends.

Whatever ends a rank ends the incarnation: what the ranks held is void, and the coordinator gives it
to others.
"""

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NamedTuple, assert_never

import msgspec
import structlog

from tlt.actors.energy import Meter, gpus, packages
from tlt.actors.hearsay import overhear
from tlt.actors.outbox import Outbox
from tlt.actors.rank_process import RankProcess
from tlt.actors.schoolhouse import Schoolhouse
from tlt.config import SessionSpec
from tlt.logs import serve_run
from tlt.messages import (
    AdoptDrafter,
    AnyEvent,
    CheckpointCommitted,
    CloseJob,
    DrafterLearned,
    DrafterRef,
    DrafterRefused,
    DrafterSpoiled,
    DrafterTrained,
    Learn,
    LearnFinished,
    MergeDrafter,
    OpenJob,
    PolicyPublished,
    PreemptDrafter,
    PromptIssued,
    ReplaceRanks,
    RolloutFinished,
    SpeculationStopped,
    StartRollout,
    StopSpeculation,
    StrategyChosen,
    TrainDrafter,
    WorkerCommand,
    WorkerFailed,
    WorkerIdled,
    WorkerInfo,
    WorkerJoined,
    WorkerLost,
)
from tlt.ranks.frames import (
    Decode,
    Dismissed,
    FromRank,
    Growing,
    Load,
    Merge,
    Overheard,
    Plain,
    Ready,
    Refused,
    SwapDrafter,
    SwapPolicy,
    Train,
    Trained,
    Unload,
)
from tlt.store import fence
from tlt.store.codec import Codec
from tlt.store.connection import GONE, Connection, persistently
from tlt.store.keys import ROLLOUT, Keys
from tlt.store.stream import Consumer, Stream, rows
from tlt.store.waiter import Waiter
from tlt.strategies import Ngram
from tlt.types import Attempt, EntryId, Incarnation, JobId, Member, PromptIndex, Step, WorkerId

_RANK_START_SECONDS = 120.0
# how long a read of the queue may block, if nothing ends it before
_PULL_BLOCK_MS = 100
_COMMAND_BLOCK_MS = 1000

_PromptKey = tuple[Step, str, PromptIndex, Member]
_prompts = Codec[PromptIssued](PromptIssued)
_events = Codec[AnyEvent](AnyEvent)
_commands = Codec[WorkerCommand](WorkerCommand)
_log = structlog.get_logger("worker")


class Place(NamedTuple):
    """What a worker has for all its lives."""

    session: SessionSpec
    worker: WorkerId
    host: str
    # of each rank
    devices: list[str]
    cores: list[frozenset[int]]
    keys: Keys
    connection: Connection


class Over(Exception):
    """This incarnation has ended."""


class Life:
    """One incarnation, from fresh ranks to their end."""

    def __init__(self, place: Place, incarnation: Incarnation) -> None:
        self.place = place
        self.incarnation = incarnation
        self.ranks: list[RankProcess] = []
        self.job: OpenJob | None = None
        # whether anything came of it; if not, the next one waits longer before it starts
        self.useful = False
        connection, keys = place.connection, place.keys
        self._events = Stream(connection, keys.events, _events)
        self._outbox = Outbox(connection, keys, self._events, place.worker, incarnation)
        self._assignment: StartRollout | None = None
        self._queue: Consumer[PromptIssued] | None = None
        # which entry each prompt in hand came from, and which rank has it
        self._held: dict[_PromptKey, tuple[EntryId, int]] = {}
        self._learning: Learn | None = None
        self._last_update: Learn | None = None
        self._trained: list[Trained] = []
        self._meter: Meter | None = None
        self._pull_again = asyncio.Event()
        self._waiter = Waiter(connection)
        # whether anything was handed out since it was last told to roll out
        self._served = False
        # nothing is in hand any more
        self._emptied = asyncio.Event()
        self._school = Schoolhouse(connection, keys, place.worker, incarnation, self.ranks)

    # --- from the first rank to the last

    async def start(self) -> None:
        place = self.place
        logs = Path(place.session.folder) / "logs"
        for index, device in enumerate(place.devices):
            self.ranks.append(
                await RankProcess.start(
                    f"{place.worker}-rank{index}",
                    device=device,
                    host=place.host,
                    cores=place.cores[index],
                    logs=logs,
                )
            )
        await asyncio.gather(*(rank.ready(_RANK_START_SECONDS) for rank in self.ranks))
        info = WorkerInfo(
            worker=place.worker,
            incarnation=self.incarnation,
            ranks=len(self.ranks),
            host=place.host,
            rendezvous=self.ranks[0].rendezvous,
        )

        async def join() -> None:
            await fence.admit(place.connection, place.keys, place.worker, self.incarnation)
            self._outbox.post(WorkerJoined(info=info))
            await self._outbox.flush()

        await persistently(join, asyncio.sleep)

    async def run(self) -> None:
        tasks: list[Coroutine[Any, Any, None]] = [
            self._outbox.run(),
            self._obey_commands(),
            self._pull(),
            self._wake_pull(),
            self._watch(),
            overhear(self._events, self._heard_elsewhere),
            self._school.share(),
            self._school.hear_growing(),
            *(self._listen(index, rank) for index, rank in enumerate(self.ranks)),
        ]
        running = [asyncio.create_task(task) for task in tasks]
        try:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await cancel_all(running)
            await self._waiter.close()

    async def end(self, reason: str) -> None:
        """What is still in the outbox is true; then nothing more will come from here."""
        self.kill()

        async def report() -> None:
            self._outbox.post(
                WorkerLost(
                    worker=self.place.worker,
                    incarnation=self.incarnation,
                    reason=reason,
                    returning=True,
                )
            )
            with contextlib.suppress(fence.Fenced):
                await self._outbox.flush()

        await persistently(report, asyncio.sleep)
        key = self.place.keys.commands(self.place.worker, self.incarnation)
        with contextlib.suppress(*GONE):
            await self.place.connection.delete(key)

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()

    # --- commands

    async def _obey_commands(self) -> None:
        connection = self.place.connection
        key = self.place.keys.commands(self.place.worker, self.incarnation)
        last = "0"
        while True:
            try:
                reply = await connection.xread({key: last}, count=10, block=_COMMAND_BLOCK_MS)
            except GONE:
                await asyncio.sleep(0.1)
                continue
            for id_, fields in rows(reply):
                await self._obey(_commands.decode(fields))
                last = id_.decode()
                with contextlib.suppress(*GONE):
                    await connection.xdel(key, id_)

    async def _obey(self, command: WorkerCommand) -> None:
        match command:
            case OpenJob():
                self._open(command)
            case CloseJob():
                self._close(command.job)
            case StartRollout():
                self._start_rollout(command)
            case TrainDrafter():
                self._assignment = None
                self._school.begin(command)
            case PreemptDrafter():
                self._school.preempt(command)
            case MergeDrafter():
                self.ranks[0].send(Merge(merge=command))
            case AdoptDrafter():
                self._adopt(command.job, command.drafter)
            case StopSpeculation():
                self._stop_speculation(command)
            case Learn():
                await self._learn(command)
            case ReplaceRanks():
                raise Over(command.reason)
            case _:
                assert_never(command)

    def _open(self, command: OpenJob) -> None:
        if command == self.job:
            return  # said twice: what it opened is running
        session = self.place.session
        run = Path(command.folder)
        serve_run(run)
        _log.info("opens", job=command.job, incarnation=self.incarnation)
        self.job = command
        self._meter = Meter(packages(), gpus(sum(d != "cpu" for d in self.place.devices)))
        stream = Stream(self._waiter.connection, self.place.keys.prompts(command.job), _prompts)
        self._queue = Consumer(stream, ROLLOUT, str(self.incarnation))
        self._held.clear()
        for index, rank in enumerate(self.ranks):
            rank.send(
                Load(
                    job=command.job,
                    epoch=command.epoch,
                    spec=command.spec,
                    worker=self.place.worker,
                    incarnation=self.incarnation,
                    rank=index,
                    flight=str(session.job_flight(command.job)),
                    committed=str(run / "blobs"),
                )
            )
        self._school.open(command)

    def _close(self, job: JobId) -> None:
        if self.job is None or self.job.job != job:
            return
        if self._learning is not None:
            raise Over("the job ended during an update")
        _log.info("closes", job=job)
        serve_run(None)
        self.job = None
        self._assignment = None
        self._learning = None
        self._queue = None
        self._held.clear()
        self._school.close()
        for rank in self.ranks:
            rank.send(Unload(job=job))

    def _start_rollout(self, command: StartRollout) -> None:
        for rank in self.ranks:
            rank.send(SwapPolicy(job=command.job, policy=command.policy))
        if command.drafter is not None:
            self._adopt(command.job, command.drafter)
        self._assignment = command
        self._served = False
        self._school.decodes(command)
        self._pull_again.set()

    def _adopt(self, job: JobId, drafter: DrafterRef | None) -> None:
        for rank in self.ranks:
            rank.send(SwapDrafter(job=job, drafter=drafter))

    def _stop_speculation(self, command: StopSpeculation) -> None:
        for rank in self.ranks:
            rank.send(Plain(job=command.job))
        self._outbox.post(
            SpeculationStopped(
                job=command.job, worker=self.place.worker, incarnation=self.incarnation
            )
        )

    async def _learn(self, command: Learn) -> None:
        if command == self._last_update:
            return  # said twice: made once
        self._assignment = None
        self._learning = self._last_update = command
        self._trained = []
        rollouts = await persistently(lambda: self._fetch(command), asyncio.sleep)
        for index, rank in enumerate(self.ranks):
            samples = tuple(
                tuple(rollouts[ref.prompt, ref.member] for ref in share.ranks[index])
                for share in command.minibatches
            )
            rank.send(Train(learn=command, local_rank=index, samples=samples))

    async def _fetch(self, command: Learn) -> dict[tuple[PromptIndex, Member], RolloutFinished]:
        wanted = [
            (ref.prompt, ref.member)
            for share in command.minibatches
            for rank in share.ranks
            for ref in rank
        ]
        if not wanted:
            return {}
        key = self.place.keys.rollouts(command.job, command.step)
        fields = [f"{prompt}.{member}" for prompt, member in wanted]
        stored = await self.place.connection.hmget(key, fields)
        decoder = msgspec.msgpack.Decoder(RolloutFinished)
        found: dict[tuple[PromptIndex, Member], RolloutFinished] = {}
        for where, raw in zip(wanted, stored, strict=True):
            if raw is None:
                raise Over(f"the rollout {where} of {command.job}, step {command.step}, is gone")
            found[where] = decoder.decode(raw)
        return found

    # --- rollouts

    async def _pull(self) -> None:
        """Take prompts from the shared queue as slots free up."""
        while True:
            queue, assignment, job = self._queue, self._assignment, self.job
            if queue is None or assignment is None or job is None:
                await self._rest()
                continue
            free = job.spec.rollout.slots * len(self.ranks) - len(self._held)
            if free <= 0:
                await self._rest()
                continue
            drained = self._served and not self._held
            try:
                await self._waiter.ready()
                entries = await queue.read(free, None if drained else _PULL_BLOCK_MS)
            except GONE:
                self._waiter.lost()
                await asyncio.sleep(0.1)
                continue
            if queue is not self._queue:
                continue
            if entries:
                self._hand_out([(entry.id, entry.message) for entry in entries])
            elif not self._held and self._assignment is assignment:
                self._idle(assignment)

    async def _wake_pull(self) -> None:
        """Once nothing is in hand, it is known that nothing is left: the read would have got it."""
        while True:
            await self._emptied.wait()
            self._emptied.clear()
            await self._waiter.wake()

    async def _rest(self) -> None:
        self._pull_again.clear()
        await self._pull_again.wait()

    def _hand_out(self, entries: list[tuple[EntryId, PromptIssued]]) -> None:
        """Neighbours share a prompt: a run of them goes to one rank that has little to do."""
        loads = [0] * len(self.ranks)
        for _, rank in self._held.values():
            loads[rank] += 1
        share = -(-(len(self._held) + len(entries)) // len(self.ranks))
        batches: list[list[PromptIssued]] = [[] for _ in self.ranks]
        for entry_id, prompt in entries:
            rank = next((r for r, load in enumerate(loads) if load < share), 0)
            loads[rank] += 1
            batches[rank].append(prompt)
            self._served = True
            self._held[_key(prompt)] = (entry_id, rank)
        for rank, batch in zip(self.ranks, batches, strict=True):
            if batch:
                rank.send(Decode(prompts=tuple(batch)))

    def _idle(self, assignment: StartRollout) -> None:
        self._assignment = None
        self._outbox.post(
            WorkerIdled(
                job=assignment.job,
                epoch=assignment.epoch,
                step=assignment.step,
                attempt=Attempt(0),
                worker=self.place.worker,
                incarnation=self.incarnation,
                purpose=assignment.purpose,
                requeues=assignment.requeues,
            )
        )

    # --- what the ranks say

    async def _listen(self, index: int, rank: RankProcess) -> None:
        while True:
            frame = await rank.receive()
            if isinstance(frame, Growing):
                await self._school.grew(frame)
            else:
                self._hear(index, frame)

    def _hear(self, rank: int, frame: FromRank) -> None:
        match frame:
            case RolloutFinished():
                self._rollout_finished(frame)
            case (
                StrategyChosen()
                | DrafterRefused()
                | DrafterLearned()
                | DrafterTrained()
                | DrafterSpoiled()
            ):
                if self.job is not None and self.job.job == frame.job:
                    self._outbox.post(frame)
            case Dismissed() if self.job is None or self.job.job != frame.job:
                pass
            case Dismissed():
                preempted = self._school.dismissed(rank, frame)
                if preempted is not None:
                    self._outbox.post(preempted)
            case Trained():
                self._rank_trained(frame)
            case Refused():
                if self.job is not None and self.job.job == frame.job:
                    self._outbox.post(
                        WorkerFailed(
                            job=frame.job,
                            worker=self.place.worker,
                            incarnation=self.incarnation,
                            error=frame.error,
                        )
                    )
            case Ready() | Growing():
                raise Over("a rank said twice that it is ready")
            case _:
                assert_never(frame)

    def _rollout_finished(self, rollout: RolloutFinished) -> None:
        if self.job is None or rollout.job != self.job.job or rollout.stop == "cancelled":
            return
        held = self._held.pop(_key(rollout), None)
        if held is not None:
            self.useful = True
            self._outbox.post(rollout, self._queue, held[0])
            self._tell_ranks(rollout, but=held[1])
            self._pull_again.set()
            if not self._held:
                self._emptied.set()

    def _heard_elsewhere(self, event: RolloutFinished | WorkerIdled) -> None:
        if event.worker == self.place.worker:
            return
        if isinstance(event, RolloutFinished):
            self._tell_ranks(event, but=None)
        else:
            self._school.somebody_idles(event)

    def _tell_ranks(self, rollout: RolloutFinished, but: int | None) -> None:
        """Those who may guess from it."""
        if self.job is None or rollout.job != self.job.job:
            return
        spec = self.job.spec
        guess = any(isinstance(arm, Ngram) for arm in spec.speculation.arms)
        if not guess and spec.drafter.train == "off":
            return
        frame = Overheard(
            job=rollout.job,
            step=rollout.step,
            purpose=rollout.purpose,
            prompt=rollout.prompt,
            member=rollout.member,
            prompt_tokens=rollout.prompt_tokens,
            tokens=rollout.tokens,
            whole=True,
        )
        for index, rank in enumerate(self.ranks):
            if index != but:
                rank.send(frame)

    def _rank_trained(self, frame: Trained) -> None:
        learn = frame.learn
        if learn != self._learning:
            return
        self.useful = True
        self._trained.append(frame)
        if len(self._trained) < len(self.ranks):
            return
        self._learning = None
        origin: dict[str, Any] = {
            "job": learn.job,
            "epoch": learn.epoch,
            "step": learn.step,
            "attempt": learn.attempt,
        }
        for trained in self._trained:
            if trained.checkpoint is not None:
                self._outbox.post(CheckpointCommitted(**origin, checkpoint=trained.checkpoint))
            if trained.policy is not None:
                self._outbox.post(
                    PolicyPublished(**origin, policy=trained.policy, metrics=trained.metrics)
                )
        self._outbox.post(
            LearnFinished(
                **origin,
                worker=self.place.worker,
                incarnation=self.incarnation,
                version=frame.version,
                seconds=max(trained.seconds for trained in self._trained),
                joules=None if self._meter is None else self._meter.read(),
            )
        )

    async def _look_at_fence(self) -> None:
        """Who has nothing to report would not find out otherwise that its lease is over."""
        place = self.place
        with contextlib.suppress(*GONE):
            await fence.check(place.connection, place.keys, place.worker, self.incarnation)

    async def _watch(self) -> None:
        """A rank that has work but makes no progress is as good as dead."""
        seen = [-1] * len(self.ranks)
        since = [time.monotonic()] * len(self.ranks)
        while True:
            await asyncio.sleep(self.place.session.heartbeat_seconds)
            await self._look_at_fence()
            if (complaint := self._school.ignored(time.monotonic())) is not None:
                raise Over(complaint)
            holding = {rank for _, rank in self._held.values()}
            for index, rank in enumerate(self.ranks):
                done, _ = rank.progress()
                busy = index in holding or self._learning is not None or self._school.trains
                if done != seen[index] or not busy or self.job is None:
                    seen[index], since[index] = done, time.monotonic()
                    continue
                still = time.monotonic() - since[index]
                if still > self.job.spec.workers.stuck_seconds:
                    raise Over(f"rank {index} stood still for {still:.0f} s")


async def cancel_all(tasks: list["asyncio.Task[None]"]) -> None:
    """Until they are done: a client's own time-out can swallow a cancellation."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.2)
        for task in pending:
            _log.warning("still there after its cancellation", task=repr(task))


def _key(prompt: PromptIssued | RolloutFinished) -> _PromptKey:
    return prompt.step, prompt.purpose, prompt.prompt, prompt.member
