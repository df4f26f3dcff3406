"""A worker's part in training the drafter: its ranks learn, and stop, together.

Answers that are still being written go to those who are idle by a stream of their own. It keeps a
few entries and is read without a group: what is missed was only an occasion to learn.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence

import msgspec

from tlt.actors.rank_process import RankProcess
from tlt.ids import Incarnation, Purpose, Step, WorkerId
from tlt.protocol.commands import OpenJob, StartRollout, StopDrafterTraining, TrainDrafter
from tlt.protocol.events import DrafterTrainingStopped, WorkerIdled
from tlt.ranks.worker_channel import Dismiss, Dismissed, PartialAnswers, School, SharePartialAnswers
from tlt.store.redis_connection import GONE, Connection
from tlt.store.redis_keys import Keys
from tlt.store.redis_stream import rows

_SHARE_SECONDS = 0.5
_KEPT = 32
_BLOCK_MS = 500
_FIELD = "growing"
_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(PartialAnswers)


class DrafterTraining:
    def __init__(
        self,
        connection: Connection,
        keys: Keys,
        worker: WorkerId,
        incarnation: Incarnation,
        ranks: Sequence[RankProcess],
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._worker = worker
        self._incarnation = incarnation
        self._ranks = ranks
        self._job: OpenJob | None = None
        self._lesson: TrainDrafter | None = None
        # the last lesson that this worker has said to be over
        self._over = 0
        self._told_to_stop: float | None = None
        # by rank
        self._dismissed: dict[int, Dismissed] = {}
        # somebody idles while this worker decodes: in which round
        self._wanted = asyncio.Event()
        self._wanted_in: tuple[Step, Purpose] | None = None
        self._changed = asyncio.Event()

    @property
    def trains(self) -> bool:
        return self._lesson is not None

    def busy(self, rank: int) -> bool:
        """One that found nothing to learn from leaves before the others do."""
        return self.trains and rank not in self._dismissed

    def open(self, job: OpenJob) -> None:
        self.close()
        self._job = job

    def close(self) -> None:
        self._job = self._lesson = self._told_to_stop = None
        self._over = 0
        self._wanted.clear()

    # --- lessons

    def begin(self, command: TrainDrafter) -> None:
        if (
            self._job is None
            or command.job != self._job.job
            or command.training_session <= self._over
        ):
            return
        if self._lesson is None or self._lesson.training_session != command.training_session:
            self._dismissed = {}
            self._told_to_stop = None
        self._lesson = command
        self._wanted.clear()
        self._changed.set()
        for rank in self._ranks:
            rank.send(School(train=command))

    def preempt(self, command: StopDrafterTraining) -> None:
        if self._lesson is None or self._lesson.training_session != command.training_session:
            return
        now = time.monotonic()
        self._told_to_stop = now
        for rank in self._ranks:
            rank.send(Dismiss(job=command.job, training_session=command.training_session, sent=now))

    def dismissed(self, rank: int, frame: Dismissed) -> DrafterTrainingStopped | None:
        """Once all ranks have stopped."""
        training_session = self._lesson
        if training_session is None or frame.training_session != training_session.training_session:
            return None
        self._dismissed[rank] = frame
        if len(self._dismissed) < len(self._ranks):
            return None
        self._lesson, self._told_to_stop, self._over = None, None, training_session.training_session
        done = self._dismissed.values()
        return DrafterTrainingStopped(
            job=training_session.job,
            worker=self._worker,
            incarnation=self._incarnation,
            training_session=training_session.training_session,
            seconds=max(frame.seconds for frame in done),
            dropped_seconds=sum(frame.dropped_seconds for frame in done),
            typical_seconds=max(frame.typical_seconds for frame in done),
        )

    def ignored(self, now: float) -> str | None:
        """Why the ranks have to be replaced, if they don't stop."""
        if self._told_to_stop is None or self._job is None:
            return None
        waited, most = now - self._told_to_stop, self._job.spec.drafter.preempt_seconds
        return f"its ranks trained on for {waited:.0f} s" if waited > most else None

    # --- answers that are being written

    def somebody_idles(self, event: WorkerIdled) -> None:
        job = self._job
        if job is None or event.job != job.job or job.spec.drafter.train == "off":
            return
        if event.purpose == "train" and self._lesson is None:
            self._wanted_in = event.step, event.purpose
            self._wanted.set()

    def decodes(self, command: StartRollout) -> None:
        """Who idled in another round does no longer."""
        if self._wanted_in != (command.step, command.purpose):
            self._wanted.clear()

    async def share(self) -> None:
        while True:
            await self._wanted.wait()
            if self._job is not None:
                for rank in self._ranks:
                    rank.send(SharePartialAnswers(job=self._job.job))
            await asyncio.sleep(_SHARE_SECONDS)

    async def grew(self, frame: PartialAnswers) -> None:
        if self._job is None or frame.job != self._job.job:
            return  # nobody would take its stream away any more
        if not frame.answers:
            return  # none of them has grown by much
        with contextlib.suppress(*GONE):
            key = self._keys.growing(frame.job)
            await self._connection.xadd(
                key, {_FIELD: _encode(frame)}, maxlen=_KEPT, approximate=False
            )

    async def hear_growing(self) -> None:
        last = "0"
        while True:
            training_session = self._lesson
            if training_session is None:
                last = "0"
                self._changed.clear()
                await self._changed.wait()
                continue
            key = self._keys.growing(training_session.job)
            try:
                reply = await self._connection.xread({key: last}, count=_KEPT, block=_BLOCK_MS)
            except GONE:
                await asyncio.sleep(0.1)
                continue
            for id_, fields in rows(reply):
                last = id_.decode()
                for answer in _decoder.decode(fields[_FIELD.encode()]).answers:
                    for rank in self._ranks:
                        rank.send(answer)
