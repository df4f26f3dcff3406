"""Supervise one incarnation of a worker: start fresh ranks, and end when the first one ends.

The state of the other ranks is then void, and the coordinator gives their work to other workers.
"""

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from tlt.actors.run_until_one_fails import IncarnationEnded, cancel_all
from tlt.actors.worker.event_outbox import Outbox
from tlt.actors.worker.message_router import MessageRouter
from tlt.actors.worker.rank_process import RankProcess
from tlt.actors.worker.worker_context import IncarnationSetup, WorkerSetup
from tlt.base.id_types import Incarnation, JobId
from tlt.protocol.events import WorkerJoined, WorkerLost
from tlt.protocol.shared_values import WorkerInfo
from tlt.store import worker_fence
from tlt.store.redis_connection import CONNECTION_ERRORS, Connection, retry_until_connected
from tlt.store.redis_keys import Keys

_RANK_START_SECONDS = 120.0


class WorkerIncarnation:
    """One incarnation, from fresh ranks to their end."""

    def __init__(
        self, worker: WorkerSetup, connection: Connection, incarnation: Incarnation
    ) -> None:
        self._worker = worker
        self._setup = IncarnationSetup(
            connection=connection,
            keys=Keys(worker.session.name),
            worker=worker.worker,
            incarnation=incarnation,
        )
        self._outbox = Outbox(self._setup)
        self._router = MessageRouter(worker, self._setup, self._outbox)

    @property
    def ranks(self) -> list[RankProcess]:
        """Return the ranks that have been started."""
        return self._setup.ranks

    @property
    def job(self) -> JobId | None:
        """Return the open job."""
        return None if self._router.job is None else self._router.job.job

    @property
    def productive(self) -> bool:
        """Return True if it has produced an answer or an update."""
        return self._router.productive

    async def start(self) -> None:
        """Start the ranks, and join the session once they are ready."""
        worker, setup = self._worker, self._setup
        logs = Path(worker.session.folder) / "logs"
        for index, cores in enumerate(worker.cores):
            rank = worker.rank(index, setup.incarnation)
            module = worker.rank_module
            self.ranks.append(await RankProcess.start(rank, cores=cores, logs=logs, module=module))
        await asyncio.gather(*(rank.wait_ready(_RANK_START_SECONDS) for rank in self.ranks))
        info = WorkerInfo(
            worker=setup.worker,
            incarnation=setup.incarnation,
            ranks=len(self.ranks),
            host=worker.host,
            rendezvous=self.ranks[0].rendezvous,
        )

        async def join() -> None:
            await worker_fence.admit(setup.fence)
            self._outbox.post(WorkerJoined(info=info))
            await self._outbox.flush()

        await retry_until_connected(join)

    async def run(self) -> None:
        """Run until a rank, a lease or a command ends this incarnation, and raise why."""
        tasks: list[Coroutine[Any, Any, None]] = [
            self._outbox.run(),
            self._watch(),
            *self._router.tasks(),
        ]
        running = [asyncio.create_task(task) for task in tasks]
        try:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            try:
                await cancel_all(running)
            finally:
                await self._router.end()

    async def end(self, reason: str) -> None:
        """Kill the ranks, and send the waiting events and then the loss of this worker."""
        setup = self._setup
        self.kill()

        async def report() -> None:
            self._outbox.post(
                WorkerLost(
                    worker=setup.worker,
                    incarnation=setup.incarnation,
                    reason=reason,
                    returning=True,
                )
            )
            with contextlib.suppress(worker_fence.Fenced):
                try:
                    await self._outbox.flush()
                except IncarnationEnded:  # answers that are lost don't wait any more
                    await self._outbox.flush()

        await retry_until_connected(report)
        with contextlib.suppress(*CONNECTION_ERRORS):
            await setup.connection.delete(setup.keys.commands(setup.worker, setup.incarnation))

    def kill(self) -> None:
        """Kill the ranks."""
        for rank in self.ranks:
            rank.kill()

    async def _watch(self) -> None:
        """End the incarnation if a rank that has work makes no progress."""
        seen = [-1] * len(self.ranks)
        since = [time.monotonic()] * len(self.ranks)
        while True:
            await asyncio.sleep(self._worker.session.heartbeat_seconds)
            await self._check_fence()
            if (complaint := self._router.training.overdue(time.monotonic())) is not None:
                raise IncarnationEnded(complaint)
            busy, job = self._router.busy_ranks(), self._router.job
            for index, rank in enumerate(self.ranks):
                done, _ = rank.progress()
                if done != seen[index] or index not in busy or job is None:
                    seen[index], since[index] = done, time.monotonic()
                    continue
                still = time.monotonic() - since[index]
                if still > job.spec.workers.stuck_seconds:
                    raise IncarnationEnded(f"rank {index} made no progress for {still:.0f} s")

    async def _check_fence(self) -> None:
        """Raise Fenced if the lease has ended; a worker without events wouldn't notice."""
        with contextlib.suppress(*CONNECTION_ERRORS):
            await worker_fence.check(self._setup.fence)
