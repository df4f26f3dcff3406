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

import structlog

from tlt.actors.cancellation import IncarnationEnded, cancel_all
from tlt.actors.drafter_training import DrafterTraining
from tlt.actors.event_outbox import Outbox
from tlt.actors.peer_answers import overhear
from tlt.actors.policy_update import Updates
from tlt.actors.prompt_intake import PromptIntake
from tlt.actors.rank_process import RankProcess
from tlt.config import SessionSpec
from tlt.ids import Attempt, Incarnation, JobId, WorkerId
from tlt.json_logs import serve_run
from tlt.protocol.commands import (
    AdoptDrafter,
    CloseJob,
    MergeDrafter,
    OpenJob,
    ReplaceRanks,
    StartRollout,
    StopDrafterTraining,
    StopSpeculation,
    TrainDrafter,
    UpdatePolicy,
    WorkerCommand,
)
from tlt.protocol.events import (
    AnyEvent,
    DecodingReported,
    DrafterDeltaReady,
    DrafterDiverged,
    DrafterMerged,
    DrafterRefused,
    RolloutFinished,
    SpeculationStopped,
    WorkerFailed,
    WorkerIdled,
    WorkerJoined,
    WorkerLost,
)
from tlt.protocol.records import WorkerInfo
from tlt.protocol.refs import DrafterRef
from tlt.ranks.worker_channel import (
    Dismissed,
    FromRank,
    Load,
    Merge,
    PartialAnswers,
    PeerAnswer,
    Plain,
    Ready,
    Refused,
    SwapDrafter,
    SwapPolicy,
    Trained,
    Unload,
)
from tlt.store import worker_fence
from tlt.store.message_codec import Codec
from tlt.store.redis_connection import GONE, Connection, persistently
from tlt.store.redis_keys import Keys
from tlt.store.redis_stream import Stream, rows
from tlt.strategies import Ngram

_RANK_START_SECONDS = 120.0
_COMMAND_BLOCK_MS = 1000

_events = Codec[AnyEvent](AnyEvent)
_commands = Codec[WorkerCommand](WorkerCommand)
_log = structlog.get_logger("worker")


class WorkerPlace(NamedTuple):
    """What a worker has for all its lives."""

    session: SessionSpec
    worker: WorkerId
    host: str
    # of each rank
    devices: list[str]
    cores: list[frozenset[int]]
    keys: Keys
    connection: Connection


class WorkerIncarnation:
    """One incarnation, from fresh ranks to their end."""

    def __init__(self, place: WorkerPlace, incarnation: Incarnation) -> None:
        self.place = place
        self.incarnation = incarnation
        self.ranks: list[RankProcess] = []
        self.job: OpenJob | None = None
        # whether anything came of it; if not, the next one waits longer before it starts
        self.useful = False
        connection, keys = place.connection, place.keys
        self._events = Stream(connection, keys.events, _events)
        self._outbox = Outbox(connection, keys, self._events, place.worker, incarnation)
        self._intake = PromptIntake(connection, keys, incarnation, self.ranks, self._idle)
        self._updates = Updates(connection, keys, place.worker, incarnation, self.ranks)
        self._school = DrafterTraining(connection, keys, place.worker, incarnation, self.ranks)

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
            await worker_fence.admit(place.connection, place.keys, place.worker, self.incarnation)
            self._outbox.post(WorkerJoined(info=info))
            await self._outbox.flush()

        await persistently(join, asyncio.sleep)

    async def run(self) -> None:
        tasks: list[Coroutine[Any, Any, None]] = [
            self._outbox.run(),
            self._obey_commands(),
            self._intake.pull(),
            self._intake.wake(),
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
            await self._intake.end()

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
            with contextlib.suppress(worker_fence.Fenced):
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
                self._intake.stop()
                self._school.begin(command)
            case StopDrafterTraining():
                self._school.preempt(command)
            case MergeDrafter():
                self.ranks[0].send(Merge(merge=command))
            case AdoptDrafter():
                self._adopt(command.job, command.drafter)
            case StopSpeculation():
                self._stop_speculation(command)
            case UpdatePolicy():
                await self._learn(command)
            case ReplaceRanks():
                raise IncarnationEnded(command.reason)
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
        self._updates.open(self.place.devices)
        self._intake.open(command)
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
        if self._updates.running:
            raise IncarnationEnded("the job ended during an update")
        _log.info("closes", job=job)
        serve_run(None)
        self.job = None
        self._intake.close()
        self._school.close()
        for rank in self.ranks:
            rank.send(Unload(job=job))

    def _start_rollout(self, command: StartRollout) -> None:
        for rank in self.ranks:
            rank.send(SwapPolicy(job=command.job, policy=command.policy))
        if command.drafter is not None:
            self._adopt(command.job, command.drafter)
        self._school.decodes(command)
        self._intake.start(command)

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

    async def _learn(self, command: UpdatePolicy) -> None:
        if self._updates.is_new(command):
            self._intake.stop()
            await self._updates.begin(command)

    def _idle(self, assignment: StartRollout) -> None:
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
            if isinstance(frame, PartialAnswers):
                await self._school.grew(frame)
            else:
                self._hear(index, frame)

    def _hear(self, rank: int, frame: FromRank) -> None:
        match frame:
            case RolloutFinished():
                self._rollout_finished(frame)
            case (
                DecodingReported()
                | DrafterRefused()
                | DrafterDeltaReady()
                | DrafterMerged()
                | DrafterDiverged()
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
            case Ready() | PartialAnswers():
                raise IncarnationEnded("a rank said twice that it is ready")
            case _:
                assert_never(frame)

    def _rollout_finished(self, rollout: RolloutFinished) -> None:
        if self.job is None or rollout.job != self.job.job or rollout.stop == "cancelled":
            return
        taken = self._intake.finished(rollout)
        if taken is not None:
            self.useful = True
            self._outbox.post(rollout, taken.queue, taken.entry)
            self._tell_ranks(rollout, but=taken.rank)

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
        frame = PeerAnswer(
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
        events = self._updates.trained(frame)
        if events is not None:
            self.useful = True
            for event in events:
                self._outbox.post(event)

    async def _look_at_fence(self) -> None:
        """Who has nothing to report would not find out otherwise that its lease is over."""
        place = self.place
        with contextlib.suppress(*GONE):
            await worker_fence.check(place.connection, place.keys, place.worker, self.incarnation)

    async def _watch(self) -> None:
        """A rank that has work but makes no progress is as good as dead."""
        seen = [-1] * len(self.ranks)
        since = [time.monotonic()] * len(self.ranks)
        while True:
            await asyncio.sleep(self.place.session.heartbeat_seconds)
            await self._look_at_fence()
            if (complaint := self._school.ignored(time.monotonic())) is not None:
                raise IncarnationEnded(complaint)
            decoding = self._intake.busy
            for index, rank in enumerate(self.ranks):
                done, _ = rank.progress()
                busy = index in decoding or self._updates.running or self._school.busy(index)
                if done != seen[index] or not busy or self.job is None:
                    seen[index], since[index] = done, time.monotonic()
                    continue
                still = time.monotonic() - since[index]
                if still > self.job.spec.workers.stuck_seconds:
                    raise IncarnationEnded(f"rank {index} stood still for {still:.0f} s")
