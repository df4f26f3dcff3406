"""Exchange answers that are still being written: idle workers learn from them.

A stream of their own carries them. It keeps a few entries and is read without a group, because a
worker that misses an entry only has less to learn from.
"""

import asyncio
import contextlib

import msgspec

from tlt.actors.worker.drafter_training import DrafterTraining
from tlt.actors.worker.worker_context import IncarnationSetup
from tlt.base.id_types import Purpose, Step
from tlt.protocol.commands import OpenJob, StartRollout
from tlt.protocol.events import WorkerIdled
from tlt.protocol.rank_messages import PartialAnswers, SharePartialAnswers
from tlt.store.redis_connection import CONNECTION_ERRORS
from tlt.store.redis_stream import read_pages

# between two requests, doubled with each until the longest
_FIRST_SECONDS, _SHARE_SECONDS = 0.1, 0.5
_KEPT = 32
_BLOCK_MS = 500
_EXPIRES_SECONDS = 600
_FIELD = "partial_answers"
_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(PartialAnswers)


class PartialAnswerExchange:
    """Share this worker's partial answers while others idle; fetch theirs while it trains."""

    def __init__(self, setup: IncarnationSetup, training: DrafterTraining) -> None:
        self._setup = setup
        self._training = training
        self._job: OpenJob | None = None
        # set while another worker idles in the rollout batch that this one decodes
        self._wanted = asyncio.Event()
        self._wanted_in: tuple[Step, Purpose] | None = None
        # False while drafter training doesn't pay
        self._keeps_answers = True

    @property
    def is_wanted(self) -> bool:
        """Return True while this worker shares its partial answers."""
        return self._wanted.is_set()

    def open(self, job: OpenJob) -> None:
        """Exchange answers of this job."""
        self._job = job
        self._wanted.clear()

    def close(self) -> None:
        """Exchange nothing until another job is opened."""
        self._job = None
        self._wanted.clear()

    def start_rollout(self, command: StartRollout) -> None:
        """Forget workers that idled in another rollout batch."""
        self._keeps_answers = command.keep_answers
        if self._wanted_in != (command.step, command.purpose):
            self._wanted.clear()

    def stop_sharing(self) -> None:
        """Share nothing until another worker idles again."""
        self._wanted.clear()

    def note_idle_worker(self, event: WorkerIdled) -> None:
        """Begin to share because another worker idles while this one decodes."""
        job = self._job
        if job is None or event.job != job.job or job.spec.drafter.train == "off":
            return
        if event.purpose == "train" and self._keeps_answers and self._training.session is None:
            self._wanted_in = event.step, event.purpose
            self._wanted.set()

    async def request(self) -> None:
        """Request the ranks' partial answers repeatedly, while other workers idle."""
        pause = _FIRST_SECONDS
        while True:
            if not self._wanted.is_set():
                pause = _FIRST_SECONDS
            await self._wanted.wait()
            if self._job is not None:
                self._setup.send(SharePartialAnswers(job=self._job.job))
            await asyncio.sleep(pause)
            pause = min(2 * pause, _SHARE_SECONDS)

    async def publish(self, message: PartialAnswers) -> None:
        """Put a rank's partial answers into the job's stream."""
        if self._job is None or message.job != self._job.job:
            return
        if message.answers:
            with contextlib.suppress(*CONNECTION_ERRORS):
                await self._add(message)

    async def _add(self, message: PartialAnswers) -> None:
        """Let the stream expire: it may be written after its job's end, which deleted it."""
        key = self._setup.keys.partial_answers(message.job)
        async with self._setup.connection.pipeline(transaction=True) as transaction:
            fields = {_FIELD: _encode(message)}
            transaction.xadd(key, fields, maxlen=_KEPT, approximate=False)  # pyright: ignore[reportArgumentType]
            transaction.expire(key, _EXPIRES_SECONDS)
            await transaction.execute()

    async def fetch(self) -> None:
        """Give other workers' partial answers to the ranks while they train."""
        while True:
            session = await self._training.wait_for_session()
            pages = read_pages(
                self._setup.connection,
                self._setup.keys.partial_answers(session.job),
                after="0",
                count=_KEPT,
                block_ms=_BLOCK_MS,
            )
            async with contextlib.aclosing(pages):
                async for page in pages:
                    for _, fields in page:
                        with contextlib.suppress(KeyError, ValueError, RecursionError):
                            for answer in _decoder.decode(fields[_FIELD.encode()]).answers:
                                self._setup.send(answer)
                    current = self._training.session
                    if current is None or current.job != session.job:
                        break
