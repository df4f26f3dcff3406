"""The coordinator reads events, lets `policies` decide them, and commits the effects.

Beside that loop it ends the leases of silent workers, and cleans up.
"""

import asyncio
import contextlib
import fcntl
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

import structlog

from tlt.actors.blobs_between_hosts import BlobTransfer
from tlt.actors.coordinator import startup_event_backlog as backlog
from tlt.actors.coordinator.deciders import Deciders
from tlt.actors.coordinator.event_batch_committer import BATCH, BatchCommitter
from tlt.actors.coordinator.lease_expiry import Leases
from tlt.actors.coordinator.periodic_cleanup import PeriodicCleanup
from tlt.actors.coordinator.redis_effects import Effects
from tlt.actors.run_until_one_fails import run_until_one_fails
from tlt.base.id_types import Epoch
from tlt.protocol.events import AnyEvent, SessionResumed, WorkerLost
from tlt.spec.config import SessionSpec
from tlt.store import worker_fence
from tlt.store.heartbeats import read_heartbeats, send_service_heartbeats
from tlt.store.job_requests import ENDED_STATUSES
from tlt.store.redis_connection import (
    CONNECTION_ERRORS,
    connect,
    refused_writes,
    retry_until_connected,
)
from tlt.store.redis_keys import COORDINATOR, REWARD, Keys
from tlt.store.redis_stream import Entry

_BLOCK_MS = 500
_CLEANUP_SECONDS = 5.0
_LOCK_FILE = "coordinator-lock"
_POLL_SECONDS = 0.05
# the coordinator's own heartbeats show that writes are refused
_REFUSED_BEATS = 4
_log = structlog.get_logger("coordinator")


class Coordinator:
    def __init__(self, spec: SessionSpec, blobs: BlobTransfer | None = None) -> None:
        self.spec = spec
        self.effects = Effects(connect(spec.redis_url), Keys(spec.name))
        self.deciders = Deciders(spec, self.effects)
        self.committer = BatchCommitter(
            spec, self.effects, self.deciders, blobs or BlobTransfer(spec, None)
        )
        # held until the process ends
        self.lock: BinaryIO | None = None

    async def run(self) -> None:
        await self.recover()
        works = [
            self._consume_events(),
            self._watch_leases(),
            self._clean_up(),
            self._send_heartbeats(),
            self._watch_epoch(),
            self.committer.room.run(),
        ]
        if not self.deciders.session.state.in_hand:
            works.append(self.committer.preparations.warm_up())
        await run_until_one_fails(*works)

    async def recover(self) -> None:
        """Begin an epoch, rebuild the state, and decide the events that are still unread.

        `startup_event_backlog` explains the order.
        """
        connection, keys = self.effects.connection, self.effects.keys
        begun = await retry_until_connected(lambda: connection.incr(keys.epoch))
        epoch = self.committer.epoch = Epoch(int(begun))
        await self._await_predecessor()
        for group in (COORDINATOR, REWARD):
            await retry_until_connected(partial(self.effects.events.ensure_group, group))
        await self.effects.load_records()
        for record in self.effects.records.values():
            if record.status in ENDED_STATUSES:
                self.committer.summaries.start(Path(record.folder))
        resumed = await self.deciders.open()
        heartbeats = await read_heartbeats(connection, keys)
        losses = backlog.lost_workers(
            self.deciders.session.state.workers, self.deciders.awaited_workers(), heartbeats
        )
        await self._fence_off(losses)
        unread = await backlog.read_unread(self.committer.consumer, heartbeats)
        await self.committer.consume([self._available(entry) for entry in unread.answers])
        # a file that exists as long as the shared memory does
        marker = Path(self.spec.flight) / "session"
        resumed.append(SessionResumed(epoch=epoch, blobs_kept=marker.exists()))
        resumed += backlog.unreported(losses, unread.others)
        await self.committer.commit(await self.committer.decide(resumed), unread.void)
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
        await self.committer.consume(unread.others)

    async def _await_predecessor(self) -> None:
        """Wait for the end of an earlier coordinator, which may be about to write its journals."""
        folder = Path(self.spec.folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.lock = open(folder / _LOCK_FILE, "ab")  # noqa: SIM115
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            await asyncio.sleep(_POLL_SECONDS)

    def _available(self, entry: backlog.AnswerEntry) -> Entry[AnyEvent]:
        answer = entry.message
        if answer.job not in self.effects.records:
            return Entry(entry.id, answer)
        return Entry(entry.id, backlog.drop_if_lost(answer, self.deciders.runs.answers(answer.job)))

    async def _fence_off(self, losses: Sequence[WorkerLost]) -> None:
        """Fence workers off before their loss is decided, so that they can write no more."""
        for lost in losses:
            place = worker_fence.FencePlace(
                self.effects.connection, self.effects.keys, lost.worker, lost.incarnation
            )
            await retry_until_connected(partial(worker_fence.fence_off, place))

    async def _consume_events(self) -> None:
        consumer = self.committer.consumer
        while True:
            try:
                # first, because what was read is not delivered again to this process
                dead = await consumer.move_to_dead_letters(self.effects.keys.dead_letters)
                entries = await consumer.read(BATCH, _BLOCK_MS)
            except CONNECTION_ERRORS as error:
                _log.warning("redis is unreachable", error=str(error))
                await asyncio.sleep(0.2)
                continue
            for entry in dead:
                _log.error("dead letter", entry=entry.id, error=entry.error)
            await self.committer.consume(entries)

    async def _send_heartbeats(self) -> None:
        connection, keys = self.effects.connection, self.effects.keys
        every_seconds = self.spec.heartbeat_seconds
        disk = self.committer.disk_waits
        await send_service_heartbeats(
            connection, keys, COORDINATOR, every_seconds, waiting=lambda: disk.waiting
        )

    async def _watch_epoch(self) -> None:
        """Raise Superseded soon after another coordinator has begun an epoch."""
        while True:
            with contextlib.suppress(*CONNECTION_ERRORS):
                await self.committer.check_epoch()
            await asyncio.sleep(self.spec.heartbeat_seconds)

    async def _watch_leases(self) -> None:
        leases = Leases(self.spec.lease_seconds)
        read = partial(read_heartbeats, self.effects.connection, self.effects.keys)
        while True:
            if refused_writes(
                self.effects.connection, _REFUSED_BEATS * self.spec.heartbeat_seconds
            ):
                leases = Leases(self.spec.lease_seconds)  # nobody's heartbeats are accepted
            asked = time.monotonic()
            heartbeats = await retry_until_connected(read)
            leases.skip(time.monotonic() - asked)
            for lost in leases.observe(heartbeats, time.monotonic()):
                await retry_until_connected(partial(self._end_lease, lost))
            await asyncio.sleep(self.spec.heartbeat_seconds)

    async def _end_lease(self, lost: WorkerLost) -> None:
        await self._fence_off([lost])
        await self.effects.post(lost)

    async def _clean_up(self) -> None:
        cleanup = PeriodicCleanup(self.spec, self.effects)
        while True:
            await asyncio.sleep(_CLEANUP_SECONDS)
            # An earlier coordinator that ends late may have received entries under this name.
            self.committer.consumer.reread_pending()
            with contextlib.suppress(*CONNECTION_ERRORS, OSError):
                await cleanup.run(tuple(self.deciders.runs.states))
