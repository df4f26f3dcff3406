"""Send a worker's events, and acknowledge the prompts that they are about.

All waiting events are sent in order in one transaction, which fails as a whole if the worker's
lease has ended. The answers that they name are on the disk before.
"""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tlt.actors.run_until_one_fails import IncarnationEnded
from tlt.actors.worker.worker_context import IncarnationSetup
from tlt.base.id_types import EntryId, JobId
from tlt.blobs.answer_files import AnswerFiles
from tlt.errors import BlobLost, find_remedy
from tlt.protocol.commands import PauseJob, PromptIssued
from tlt.protocol.events import AnyEvent, RolloutCut, RolloutFinished
from tlt.protocol.refs import AnswerRef
from tlt.store import worker_fence
from tlt.store.message_codec import Codec
from tlt.store.redis_connection import retry_until_connected
from tlt.store.redis_stream import Consumer, Stream

_events = Codec[AnyEvent](AnyEvent)


class TakenPrompt(NamedTuple):
    """A prompt that a rank answers, with its entry in the job's queue."""

    queue: Consumer[PromptIssued]
    entry: EntryId
    rank: int


class Outbox:
    """The worker's events that wait to be sent."""

    def __init__(self, setup: IncarnationSetup) -> None:
        self.events = Stream(setup.connection, setup.keys.events, _events)
        self._setup = setup
        self._waiting: list[tuple[AnyEvent, TakenPrompt | None]] = []
        self._wake = asyncio.Event()
        # of a job that was closed, too: its last events may still wait
        self._answers: dict[JobId, AnswerFiles] = {}

    def open(self, job: JobId, run: Path) -> None:
        """Send events about answers of a job, which are in its run's folder."""
        self._answers[job] = AnswerFiles(run)

    def post(self, event: AnyEvent, answered: TakenPrompt | None = None) -> None:
        """Send an event soon, and acknowledge the prompt that it answers."""
        self._waiting.append((event, answered))
        self._wake.set()

    async def run(self) -> None:
        """Send events as they are posted."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await retry_until_connected(self.flush)

    async def flush(self) -> None:
        """Send all waiting events; raise Fenced if the worker's lease has ended."""
        batch = list(self._waiting)
        if not batch:
            return
        await self._sync_answers([event for event, _ in batch])
        async with worker_fence.transaction(self._setup.fence) as transaction:
            for event, answered in batch:
                self.events.add(transaction, event)
                if answered is not None:
                    answered.queue.acknowledge(transaction, [answered.entry])
        del self._waiting[: len(batch)]
        for _, answered in batch:
            if answered is not None:
                answered.queue.forget([answered.entry])

    async def _sync_answers(self, events: Sequence[AnyEvent]) -> None:
        """Sync here and not in the coordinator, where the answers of all workers would wait.

        An answer that is lost is not reported, and so its prompt goes back to the queue. If its
        disk is full, the job is paused: its prompts would be given up after some tries.
        """
        refs: dict[JobId, list[AnswerRef]] = defaultdict(list)
        for event in events:
            if isinstance(event, RolloutFinished | RolloutCut) and event.answer is not None:
                refs[event.job].append(event.answer)
        try:
            for job, answers in refs.items():
                await asyncio.to_thread(self._answers[job].sync, answers)
        except BlobLost as error:
            self._waiting = [
                each
                for each in self._waiting
                if not isinstance(each[0], RolloutFinished | RolloutCut)
            ]
            if (remedy := find_remedy(error)) is not None:
                shortage = f"{error}. {remedy}"
                pauses = [PauseJob(job=job, shortage=shortage) for job in refs]
                self._waiting += [(pause, None) for pause in pauses]
            raise IncarnationEnded(str(error)) from error
