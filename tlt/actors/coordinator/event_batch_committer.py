"""A batch of events is decided and committed as a whole: files first, then one transaction.

The transaction holds every effect, the commands, the position that each journal has reached, and
the acknowledgement of the events.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import structlog

from tlt.actors.blobs_between_hosts import BlobTransfer, referenced_blobs
from tlt.actors.coordinator.blob_commit_thread import BlobCommits, Commit
from tlt.actors.coordinator.deciders import SESSION, Deciders
from tlt.actors.coordinator.logger_and_summary_processes import SummaryProcesses
from tlt.actors.coordinator.pause_jobs_without_room import RoomWatch
from tlt.actors.coordinator.preparation_process import JobPreparations
from tlt.actors.coordinator.redis_effects import Caused, Effects
from tlt.actors.coordinator.write_retries import DiskWaits
from tlt.base.id_types import EntryId, Epoch, JobId
from tlt.errors import BlobError, JournalError, TltError
from tlt.policies.run.blob_retention import blobs_of_ended
from tlt.policies.run.run_state import RunState
from tlt.policies.session.job_queue import SessionState
from tlt.protocol.commands import (
    DiscardBlobs,
    EndJob,
    PrepareJob,
    RecordStatus,
    ReleaseBlobs,
    SuspendJob,
)
from tlt.protocol.events import AnyEvent, DrafterCommitFailed, PolicyPublished
from tlt.spec.config import SessionSpec
from tlt.store.guarded_commands import Guard
from tlt.store.journal import Position
from tlt.store.journal_replayed_state import DeciderState
from tlt.store.redis_connection import retry_until_connected
from tlt.store.redis_keys import COORDINATOR
from tlt.store.redis_stream import Consumer, Entry

BATCH = 512
_EPOCH = Guard("""
local newest = redis.call('GET', KEYS[1])
if newest ~= ARGV[1] then
    return newest or '0'
end
""")
_log = structlog.get_logger("coordinator")


class Superseded(TltError):
    """Another coordinator has begun an epoch; this process ends."""


class _Written(NamedTuple):
    caused: list[Caused]
    positions: Mapping[str, Position]
    failures: Sequence[DrafterCommitFailed]


class BatchCommitter:
    def __init__(
        self, spec: SessionSpec, effects: Effects, deciders: Deciders, transfer: BlobTransfer
    ) -> None:
        self.consumer = Consumer(effects.events, COORDINATOR, "coordinator")
        self.room = RoomWatch(spec, effects, deciders)
        self.preparations = JobPreparations(effects, spec.ranks_per_worker, self.room)
        self.summaries = SummaryProcesses()
        self.disk_waits = DiskWaits()
        self.epoch = Epoch(0)
        self._spec = spec
        self._effects = effects
        self._deciders = deciders
        self._transfer = transfer
        self._fetching: set[asyncio.Task[None]] = set()
        self._blob_commits = BlobCommits()

    async def consume(self, entries: Sequence[Entry[AnyEvent]]) -> None:
        """Decide and commit entries in batches."""
        for start in range(0, len(entries), BATCH):
            batch = entries[start : start + BATCH]
            caused = await self.decide([entry.message for entry in batch])
            await self.commit(caused, [entry.id for entry in batch])
            for entry in batch:
                if isinstance(entry.message, PolicyPublished):
                    # a copy on this host outlasts the host that wrote it
                    task = asyncio.create_task(self._fetch(entry.message))
                    self._fetching.add(task)
                    task.add_done_callback(self._fetching.discard)

    async def decide(self, events: Sequence[AnyEvent]) -> list[Caused]:
        return [caused for event in events for caused in await self._deciders.decide(event)]

    async def commit(self, caused: list[Caused], entries: Sequence[EntryId]) -> None:
        """Commit decisions and acknowledge the entries that led to them."""
        await self._fetch_blobs(caused)
        written = await self._write_files(caused)

        async def execute() -> None:
            connection, keys = self._effects.connection, self._effects.keys
            transaction = connection.pipeline(transaction=False)
            await self._effects.fill(transaction, written.caused)
            for event in written.failures:
                self._effects.events.add(transaction, event)
            for decider, position in written.positions.items():
                transaction.hset(keys.committed, decider, msgspec.json.encode(position))
            self.consumer.acknowledge(transaction, entries)
            newer = await _EPOCH.execute(connection, transaction, keys.epoch, self.epoch)
            if newer is not None:
                self._refuse(newer)

        await retry_until_connected(execute)
        self.consumer.forget(entries)
        self._act(written.caused)
        self._deciders.after_commit()

    async def check_epoch(self) -> None:
        """Raise Superseded if another coordinator has begun an epoch."""
        self._refuse(await self._effects.connection.get(self._effects.keys.epoch))

    def _refuse(self, newest: bytes) -> None:
        if int(newest) != self.epoch:
            raise Superseded(f"epoch {self.epoch} is over: another coordinator runs")

    async def _fetch_blobs(self, caused: Sequence[Caused]) -> None:
        """Fetch what is to be committed to the run's folder."""
        for command, _, _ in caused:
            if isinstance(command, Commit):
                await self._fetch(command)

    async def _fetch(self, message: Commit | PolicyPublished) -> None:
        run = self._deciders.runs.states.get(message.job)
        saved = None if run is None else run.state.policy.checkpoint
        committed = () if saved is None else saved.blobs
        lacking = [blob for blob in referenced_blobs(message) if blob not in committed]
        await self._transfer.fetch(message.job, self._deciders.runs.folder(message.job), lacking)

    async def _write_files(self, caused: list[Caused]) -> _Written:
        """Write committed blobs and the lines of the journals; wait while that isn't possible."""
        deciders = self._deciders
        failures: list[DrafterCommitFailed] = []
        positions: dict[str, Position] = {}
        # the end of a run that can't be written may let another one go on
        while (run := deciders.runs.next_unwritten()) is not None:
            try:
                failures += await self.disk_waits.retry(partial(self._write_run, run, caused))
                positions[run.state.job] = run.journal.position
            except (JournalError, BlobError) as error:
                caused = await deciders.fail_run(run, caused, str(error))
        positions[SESSION] = await self.disk_waits.retry(partial(_write, deciders.session))
        return _Written(caused, positions, failures)

    async def _write_run(
        self, run: DeciderState[RunState], caused: Sequence[Caused]
    ) -> list[DrafterCommitFailed]:
        job = run.state.job
        commits = [each for each in caused if each.run == job and isinstance(each.command, Commit)]
        failures: list[DrafterCommitFailed] = []
        if commits:
            blobs = self._deciders.runs.blobs(job)
            failures = await self._blob_commits.commit(blobs, commits)
        run.write()
        return failures

    def _act(self, caused: Sequence[Caused]) -> None:
        """Carry out the parts of commands that lie outside the transaction."""
        for command, _, _ in caused:
            match command:
                case PrepareJob():
                    self.preparations.begin(command, self._deciders.runs.folder(command.job))
                case ReleaseBlobs():
                    folder = self._deciders.runs.folder(command.job)
                    self._transfer.release(command.job, folder, command.blobs)
                case DiscardBlobs():
                    folder = self._deciders.runs.folder(command.job)
                    self._transfer.release(command.job, folder, command.blobs)
                    blobs = self._deciders.runs.blobs(command.job)
                    self._blob_commits.discard(blobs, command.blobs)
                case EndJob():
                    self._transfer.forget(command.job)
                    self._discard_unnamed_blobs(command.job)
                    self.summaries.start(self._deciders.runs.folder(command.job))
                case SuspendJob():
                    # what the job lacks room for may be what it has kept to learn from
                    self._transfer.forget(command.job, only_states=True)
                case RecordStatus():
                    if command.status in ("cancelled", "paused"):
                        self.preparations.cancel(command.job)
                    _log.info("job", job=command.job, status=command.status, error=command.error)
                case _:
                    pass

    def _discard_unnamed_blobs(self, job: JobId) -> None:
        """Discard what abandoned attempts of a job that ends have left in its run's folder."""
        run = self._deciders.runs.states.get(job)
        if run is not None and (kept := blobs_of_ended(run.state)) is not None:
            self._blob_commits.discard_all_but(self._deciders.runs.blobs(job), kept)


async def _write(decider: DeciderState[SessionState]) -> Position:
    return decider.write()
