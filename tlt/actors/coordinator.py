"""The coordinator's shell: read, decide, execute, acknowledge. All decisions are in `policies`.

Events are consumed and committed in batches: the journal's lines first, then one transaction with
every effect, the commands, how far the journal reaches, and the acknowledgement.
"""

import asyncio
import contextlib
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import redis.exceptions
import structlog

from tlt.actors import recovery
from tlt.actors.effects import Caused, Effects
from tlt.actors.job_preparer import Preparer
from tlt.actors.leases import Leases
from tlt.actors.logger_process import start_loggers
from tlt.blobs import Blobs
from tlt.config import JobSpec, SessionSpec
from tlt.dataset import Prompts, prompts_file
from tlt.errors import BlobError, JournalError, TltError
from tlt.ids import EntryId, Epoch, JobId
from tlt.json_logs import serve_run
from tlt.policies import coordinator
from tlt.policies.job import job_queue
from tlt.policies.job.job_queue import SessionState
from tlt.policies.job.run_state import Phase, RunState
from tlt.protocol.commands import (
    CancelJob,
    CloseJob,
    Command,
    CommitBestPolicy,
    CommitDrafter,
    DiscardBlobs,
    FinishRun,
    KeepRollout,
    PrepareJob,
    RecordStatus,
    ReleaseBlobs,
    StartJob,
)
from tlt.protocol.events import (
    AnyEvent,
    DrafterCommitFailed,
    JobCancelRequested,
    JobEnded,
    JobPrepared,
    JobRefused,
    JobStarted,
    JobSubmitted,
    RolloutFinished,
    SessionResumed,
    WorkerJoined,
    WorkerLost,
)
from tlt.protocol.records import JobRecord
from tlt.store import worker_fence
from tlt.store.decider_state import DeciderState
from tlt.store.job_records import new_record
from tlt.store.journal import START, Position
from tlt.store.message_codec import Codec
from tlt.store.redis_connection import GONE, Connection, connect, persistently
from tlt.store.redis_keys import COORDINATOR, REWARD, ROLLOUT, Keys
from tlt.store.redis_stream import Consumer, Stream

_BATCH = 512
_BLOCK_MS = 500
_TRIM_SECONDS = 5.0
_SESSION = "session"
_events = Codec[AnyEvent](AnyEvent)
_log = structlog.get_logger("coordinator")


class _Written(NamedTuple):
    caused: list[Caused]
    positions: Mapping[str, Position]
    # what others have to hear of it
    said: Sequence[AnyEvent]


class Superseded(TltError):
    """Whoever decided in the meantime has the say; this process ends."""


class Coordinator:
    def __init__(self, spec: SessionSpec) -> None:
        self.spec = spec
        self.keys = Keys(spec.name)
        self.connection: Connection = connect(spec.redis_url)
        self.events = Stream(self.connection, self.keys.events, _events)
        self.effects = Effects(self.connection, self.keys, self.events)
        self.consumer = Consumer(self.events, COORDINATOR, "coordinator")
        self.epoch = Epoch(0)
        self.session: DeciderState[SessionState]
        self.job: DeciderState[RunState] | None = None
        self._preparer = Preparer()
        self._preparing: dict[JobId, asyncio.Task[None]] = {}
        self._loggers: list[subprocess.Popen[bytes]] = []

    async def run(self) -> None:
        await self._recover()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._decide_for_ever())
            tasks.create_task(self._watch_leases())
            tasks.create_task(self._trim())
            if self.session.state.current is None:
                tasks.create_task(self._preparer.start())

    # --- coming up

    async def _recover(self) -> None:
        self.epoch = Epoch(int(await self.connection.incr(self.keys.epoch)))
        for group in (COORDINATOR, REWARD):
            await self.events.ensure_group(group)
        records = await self.connection.hgetall(self.keys.jobs)
        self.effects.records = {
            JobId(job.decode()): msgspec.json.decode(raw, type=JobRecord)
            for job, raw in records.items()
        }
        folder = Path(self.spec.folder) / "session"
        self.session = DeciderState(
            folder, await self._committed(_SESSION), SessionState(), job_queue.decide
        )
        resumed: list[AnyEvent] = []
        current = self.session.state.current
        if current is not None and self.session.state.jobs[current].status == "running":
            try:
                await self._open_run(current, self.session.state.jobs[current].spec)
            except (JournalError, OSError) as error:
                self.job = None
                resumed.append(JobEnded(job=current, status="failed", error=str(error)))
        run = None if self.job is None else self.job.state
        beats = await recovery.beats_of(self.connection, self.keys)
        losses = recovery.gone(self.session.state.workers, run, beats)
        for lost in losses:
            # The fence first: what it still writes is among what waits, or it writes nothing.
            await worker_fence.shut_out(self.connection, self.keys, lost.worker, lost.incarnation)
        waiting = await recovery.waiting(self.consumer, beats)
        await self._commit_in_turn(
            [(self._answered(entry.message), entry.id) for entry in waiting.answers]
        )
        resumed.append(SessionResumed(epoch=self.epoch, blobs_kept=self._marker.exists()))
        resumed += recovery.unsaid(losses, waiting.rest)
        await self._commit(resumed, waiting.void)
        self._marker.parent.mkdir(parents=True, exist_ok=True)
        self._marker.touch()
        await self._commit_in_turn([(entry.message, entry.id) for entry in waiting.rest])

    def _answered(self, rollout: RolloutFinished) -> AnyEvent:
        if rollout.job not in self.effects.records:
            return rollout
        return recovery.answered(rollout, self._blobs(rollout.job))

    async def _commit_in_turn(self, waiting: Sequence[tuple[AnyEvent, EntryId]]) -> None:
        for start in range(0, len(waiting), _BATCH):
            batch = waiting[start : start + _BATCH]
            await self._commit([event for event, _ in batch], [entry for _, entry in batch])

    async def _committed(self, book: str) -> Position:
        raw = await self.connection.hget(self.keys.committed, book)
        return START if raw is None else msgspec.json.decode(raw, type=Position)

    @property
    def _marker(self) -> Path:
        """It is there as long as the shared memory is that of this session."""
        return Path(self.spec.flight) / "session"

    async def _open_run(self, job: JobId, spec: JobSpec) -> DeciderState[RunState]:
        folder = self.run_folder(job)
        serve_run(folder)
        self.job = DeciderState(
            folder, await self._committed(job), coordinator.new_run(job, spec), coordinator.decide
        )
        self.effects.prompts = {"train": Prompts(prompts_file(folder, "train"))}
        if spec.data.eval is not None:
            self.effects.prompts["eval"] = Prompts(prompts_file(folder, "eval"))
        self.effects.max_tries = spec.rollout.max_tries
        await self.effects.prompt_stream(job).ensure_group(ROLLOUT)
        self._tell_loggers(folder, spec)
        return self.job

    def _tell_loggers(self, folder: Path, spec: JobSpec) -> None:
        """They end by themselves when they have told how the job ended."""
        self._loggers = [process for process in self._loggers if process.poll() is None]
        try:
            self._loggers += start_loggers(folder, spec)
        except OSError as error:
            _log.error("loggers did not start", error=str(error))

    def run_folder(self, job: JobId) -> Path:
        return Path(self.effects.records[job].folder)

    def _blobs(self, job: JobId) -> Blobs:
        return Blobs(self.spec.job_flight(job), self.run_folder(job) / "blobs")

    # --- read, decide, execute, acknowledge

    async def _decide_for_ever(self) -> None:
        while True:
            try:
                entries = await self.consumer.read(_BATCH, _BLOCK_MS)
                buried = await self.consumer.bury_undecodable(self.keys.dead_letters)
            except GONE as error:
                _log.warning("redis is gone", error=str(error))
                await asyncio.sleep(0.2)
                continue
            for letter in buried:
                _log.error("dead letter", entry=letter.id, error=letter.error)
            if entries:
                ids = [entry.id for entry in entries]
                await self._commit([entry.message for entry in entries], ids)

    async def _commit(
        self,
        events: Sequence[AnyEvent],
        entries: Sequence[EntryId],
    ) -> None:
        caused: list[Caused] = []
        for event in events:
            await self._decide(event, caused)
        written = self._write(caused)
        caused = written.caused

        async def commit() -> None:
            async with self.connection.pipeline(transaction=True) as transaction:
                await transaction.watch(self.keys.epoch)
                if int(await transaction.get(self.keys.epoch)) != self.epoch:
                    raise Superseded(f"epoch {self.epoch} is over: another coordinator is at work")
                transaction.multi()
                await self.effects.fill(transaction, caused)
                for event in written.said:
                    self.events.add(transaction, event)
                for book, position in written.positions.items():
                    transaction.hset(self.keys.committed, book, msgspec.json.encode(position))
                self.consumer.acknowledge(transaction, entries)
                await transaction.execute()

        await persistently(commit, asyncio.sleep)
        self.consumer.forget(entries)
        self._after_commit(caused)

    async def _decide(self, event: AnyEvent, caused: list[Caused]) -> None:
        """One event, and those for the other decider that its commands amount to."""
        waiting: deque[tuple[DeciderState[Any], AnyEvent]] = deque(
            (book, event) for book in self._addressees(event)
        )
        while waiting:
            book, event = waiting.popleft()
            for command in book.decide(event, time.time()):
                caused.append(Caused(command, event, by_session=book is self.session))
                match command:
                    case StartJob():
                        waiting.append(await self._begin(command))
                    case CancelJob() if self.job is not None:
                        waiting.append((self.job, JobCancelRequested(job=command.job)))
                    case FinishRun():
                        waiting.append((self.session, _ended(command)))
                    case _:
                        pass

    async def _begin(self, command: StartJob) -> tuple[DeciderState[Any], AnyEvent]:
        try:
            run = await self._open_run(command.job, command.spec)
        except (JournalError, OSError) as error:
            return self.session, JobEnded(job=command.job, status="failed", error=str(error))
        return run, _started(command, self.epoch)

    def _addressees(self, event: AnyEvent) -> list[DeciderState[Any]]:
        running = self.job
        if running is not None and running.state.phase is Phase.ENDED:
            running = None
        match event:
            case JobSubmitted():
                if event.job not in self.effects.records:
                    record = new_record(event.job, event.spec, event.folder)
                    self.effects.records[event.job] = record
                return [self.session]
            case JobPrepared() | JobRefused() | JobEnded() | JobCancelRequested():
                return [self.session]
            case SessionResumed() | WorkerJoined() | WorkerLost():
                return [self.session] if running is None else [self.session, running]
            case _:
                about_it = running is not None and running.state.job == event.job
                return [running] if running is not None and about_it else []

    def _write(self, caused: list[Caused]) -> _Written:
        """Files first: committed blobs and the journals' lines."""
        said: list[DrafterCommitFailed] = []
        positions: dict[str, Position] = {}
        if self.job is not None:
            try:
                said = self._commit_blobs(self.job.state.job, caused)
                positions[self.job.state.job] = self.job.write()
            except (JournalError, BlobError) as error:
                caused = self._fail_run(self.job, caused, str(error))
        positions[_SESSION] = self.session.write()
        return _Written(caused, positions, said)

    def _commit_blobs(self, job: JobId, caused: Sequence[Caused]) -> list[DrafterCommitFailed]:
        """Without a drafter, lost or too large for the disk, a job is slower, and no less right."""
        blobs, not_kept = self._blobs(job), list[DrafterCommitFailed]()
        for command, event, _ in caused:
            match command:
                case CommitBestPolicy() if command.policy.weights is not None:
                    blobs.commit(command.policy.weights)
                case CommitDrafter():
                    try:
                        blobs.commit(command.drafter.weights)
                    except BlobError as error:
                        not_kept.append(_not_kept(command, error))
                case KeepRollout() if isinstance(event, RolloutFinished):
                    for tensor in (event.tokens, event.logprobs):
                        if tensor.blob is not None:
                            blobs.commit(tensor.blob)
                            blobs.release(tensor.blob)
                case _:
                    pass
        return not_kept

    def _fail_run(
        self, run: DeciderState[RunState], caused: list[Caused], error: str
    ) -> list[Caused]:
        """Nothing can be written to the run's folder: what was decided just now did not happen."""
        _log.error("job failed", job=run.state.job, error=error)
        job = run.state.job
        closed: list[Command] = [
            CloseJob(worker=w.info.worker, incarnation=w.info.incarnation, job=job)
            for w in run.state.workers.values()
        ]
        finished = FinishRun(job=job, status="failed", error=error)
        ended = _ended(finished)
        kept = [entry for entry in caused if entry.by_session]
        kept += [Caused(command, ended, by_session=False) for command in (*closed, finished)]
        kept += [
            Caused(command, ended, by_session=True)
            for command in self.session.decide(ended, time.time())
        ]
        run.journal.close()
        self.job = None
        serve_run(None)
        return kept

    def _after_commit(self, caused: Sequence[Caused]) -> None:
        for command, _, _ in caused:
            match command:
                case PrepareJob():
                    self._prepare(command)
                case ReleaseBlobs():
                    for blob in command.blobs:
                        self._blobs(command.job).release(blob)
                case DiscardBlobs():
                    for blob in command.blobs:
                        self._blobs(command.job).discard(blob)
                case FinishRun():
                    shutil.rmtree(self.spec.job_flight(command.job), ignore_errors=True)
                case RecordStatus():
                    if command.status == "cancelled" and command.job in self._preparing:
                        self._preparing[command.job].cancel()
                    _log.info("job", job=command.job, status=command.status, error=command.error)
                case _:
                    pass
        self.session.snapshot_if_due()
        if self.job is not None:
            self.job.snapshot_if_due()
            if self.job.state.phase is Phase.ENDED:
                self.job.close()
                self.job = None
                serve_run(None)

    def _prepare(self, command: PrepareJob) -> None:
        async def report() -> None:
            outcome = await self._preparer.prepare(
                command.job, command.spec, self.run_folder(command.job)
            )
            await self._post(outcome)

        task = asyncio.create_task(report())
        self._preparing[command.job] = task
        task.add_done_callback(lambda _: self._preparing.pop(command.job, None))

    async def _post(self, event: AnyEvent) -> None:
        async def add() -> None:
            async with self.connection.pipeline(transaction=True) as transaction:
                self.events.add(transaction, event)
                await transaction.execute()

        await persistently(add, asyncio.sleep)

    # --- beside it

    async def _watch_leases(self) -> None:
        leases = Leases(self.spec.lease_seconds)
        while True:
            with contextlib.suppress(*GONE):
                beats = await recovery.beats_of(self.connection, self.keys)
                for lost in leases.observe(beats, time.monotonic()):
                    # The fence first: what it still writes then counts, or it writes nothing.
                    await worker_fence.shut_out(
                        self.connection, self.keys, lost.worker, lost.incarnation
                    )
                    await self._post(
                        WorkerLost(
                            worker=lost.worker,
                            incarnation=lost.incarnation,
                            reason=f"no heartbeat for {lost.silent_seconds:.0f} s",
                            returning=False,
                        )
                    )
            await asyncio.sleep(self.spec.heartbeat_seconds)

    async def _trim(self) -> None:
        while True:
            await asyncio.sleep(_TRIM_SECONDS)
            # A predecessor that takes long to die may have been given entries under our name.
            self.consumer.look_back()
            with contextlib.suppress(*GONE):
                await self.events.trim()
                if self.job is not None:
                    prompts = self.effects.prompt_stream(self.job.state.job)
                    with contextlib.suppress(redis.exceptions.ResponseError):
                        await prompts.trim()


def _not_kept(command: CommitDrafter, error: BlobError) -> DrafterCommitFailed:
    _log.warning("drafter not kept", job=command.job, error=str(error))
    return DrafterCommitFailed(job=command.job, version=command.drafter.version, error=str(error))


def _started(command: StartJob, epoch: Epoch) -> JobStarted:
    return JobStarted(
        job=command.job,
        epoch=epoch,
        spec=command.spec,
        folder=command.folder,
        train_prompts=command.train_prompts,
        eval_prompts=command.eval_prompts,
        workers=command.workers,
    )


def _ended(command: FinishRun) -> JobEnded:
    return JobEnded(job=command.job, status=command.status, error=command.error)
