"""Follow a worker's training sessions, which its ranks begin and stop together."""

import asyncio
import time

import msgspec

from tlt.actors.worker.worker_context import IncarnationSetup
from tlt.protocol.commands import OpenJob, StopDrafterTraining, TrainDrafter
from tlt.protocol.events import DrafterTrainingStopped


class DrafterTraining:
    """The training session of a worker's ranks."""

    def __init__(self, setup: IncarnationSetup) -> None:
        self._setup = setup
        self._job: OpenJob | None = None
        # the command that the ranks carry out now
        self.session: TrainDrafter | None = None
        # the last training session that this worker has reported to be over
        self._last_over = 0
        # time at which the ranks were commanded to stop
        self._stop_sent: float | None = None
        # by rank
        self._stopped: dict[int, DrafterTrainingStopped] = {}
        # the ranks that train in the open job
        self._members: frozenset[int] = frozenset()
        self._started = asyncio.Event()

    async def wait_for_session(self) -> TrainDrafter:
        """Return the training session, once there is one."""
        while self.session is None:
            self._started.clear()
            await self._started.wait()
        return self.session

    def is_training(self, rank: int) -> bool:
        """Return True if the rank trains; a rank without answers to learn from stops early."""
        trains = self.session is not None and rank in self._members
        return trains and rank not in self._stopped

    def open(self, job: OpenJob) -> None:
        """Follow the training sessions of this job."""
        self.close()
        self._job = job
        self._members = frozenset(self._setup.engines(job.spec.rollout))

    def close(self) -> None:
        """Forget the job."""
        self._job = self.session = self._stop_sent = None
        self._last_over = 0

    def begin(self, command: TrainDrafter) -> None:
        """Start the ranks' training, unless this training session is over."""
        job = self._job
        over = command.training_session <= self._last_over
        if job is None or command.job != job.job or over:
            return
        if self.session is None or self.session.training_session != command.training_session:
            self._stopped = {}
            self._stop_sent = None
        self.session = command
        self._started.set()
        self._setup.send(command)

    def stop(self, command: StopDrafterTraining) -> None:
        """Stop the ranks if they are in this training session."""
        if self.session is None or self.session.training_session != command.training_session:
            return
        self._stop_sent = time.monotonic()
        self._setup.send(command)

    def note_stopped(
        self, rank: int, event: DrafterTrainingStopped
    ) -> DrafterTrainingStopped | None:
        """Return the worker's event once all of its ranks have stopped."""
        session = self.session
        if session is None or event.training_session != session.training_session:
            return None
        self._stopped[rank] = event
        if len(self._stopped) < len(self._members):
            return None
        sent, events = self._stop_sent, self._stopped.values()
        self.session, self._stop_sent, self._last_over = None, None, session.training_session
        return msgspec.structs.replace(
            event,
            seconds=0.0 if sent is None else time.monotonic() - sent,
            dropped_seconds=sum(found.dropped_seconds for found in events),
            median_seconds=max(found.median_seconds for found in events),
        )

    def overdue(self, now: float) -> str | None:
        """Return a reason to replace the ranks if they don't stop in time."""
        if self._stop_sent is None or self._job is None:
            return None
        waited, most = now - self._stop_sent, self._job.spec.drafter.stop_seconds
        return f"its ranks trained on for {waited:.0f} s" if waited > most else None
