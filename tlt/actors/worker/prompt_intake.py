"""Take prompts from the job's queue for the free slots of a worker's ranks.

When a rollout batch begins, each worker takes no more than its share. Shortly after, any worker may
take the prompts that are left. The worker idles once its ranks have no prompts and a read of the
queue finds none.

Where long groups are put off, the queue may still have prompts of groups that their step ended
without. They are dropped. Where two steps are decoded at once, each has a queue of its own.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence

import structlog

from tlt.actors.worker.conversations import AnswerKey, Conversations
from tlt.actors.worker.event_outbox import Outbox, TakenPrompt
from tlt.actors.worker.rank_process import RankProcess
from tlt.actors.worker.worker_context import IncarnationSetup
from tlt.base.id_types import Attempt, Step
from tlt.protocol.commands import OpenJob, PromptIssued, StartRollout
from tlt.protocol.events import RolloutCut, RolloutFinished, SizesChosen, WorkerIdled
from tlt.protocol.rank_messages import DecodePrompts
from tlt.store.blocking_read import BlockingConnection
from tlt.store.message_codec import Codec
from tlt.store.redis_connection import CONNECTION_ERRORS
from tlt.store.redis_keys import ROLLOUT, prompt_queues, queue_of
from tlt.store.redis_stream import Consumer, Entry, Stream

# length of a blocking read of the queue, which `wake` may end earlier: a worker that has had no
# prompt is to report soon that it idles, and one that has some only waits for more
_BLOCK_MS, _SERVED_BLOCK_MS = 100, 1000
# time in which a worker that still trains the drafter can stop and take its share
_SHARE_SECONDS = 1.0

_log = structlog.get_logger("worker")
_prompts = Codec[PromptIssued](PromptIssued)


class PromptIntake:
    """The prompts that a worker's ranks are answering, and how it gets more."""

    def __init__(
        self, setup: IncarnationSetup, outbox: Outbox, share_seconds: float = _SHARE_SECONDS
    ) -> None:
        # set when the last prompt is answered, until more are taken
        self.answered = asyncio.Event()
        self._setup = setup
        self._outbox = outbox
        self._share_seconds = share_seconds
        self._blocking = BlockingConnection(setup.connection)
        # the job's queues, and the one that is read
        self._queues: list[Consumer[PromptIssued]] = []
        self._queue: Consumer[PromptIssued] | None = None
        # the ranks that answer prompts, by index
        self._engines: dict[int, RankProcess] = {}
        self._slots = 0
        self._leaves_slots_open = False
        # True if prompts of earlier steps are dropped
        self._defers = False
        self._dropped: list[Entry[PromptIssued]] = []
        # time until which the worker takes no more than its share
        self._share_until = 0.0
        self._assignment: StartRollout | None = None
        self._taken: dict[AnswerKey, TakenPrompt] = {}
        # True if prompts were handed out since the last StartRollout
        self._served = False
        self._changed = asyncio.Event()
        self.conversations = Conversations(setup, outbox, self._changed)
        # set when a blocking read has to end: the last prompt is answered, or none may be taken
        self._interrupted = asyncio.Event()

    @property
    def busy_ranks(self) -> set[int]:
        """Return the ranks that have prompts to answer, and don't wait for environments."""
        waits = self.conversations.is_waiting
        return {taken.rank for key, taken in self._taken.items() if not waits(key)}

    def open(self, command: OpenJob) -> None:
        """Take prompts of this job."""
        numbers = prompt_queues(command.spec.algorithm.staleness)
        keys = (self._setup.keys.prompts(command.job, number) for number in numbers)
        streams = (Stream(self._blocking.connection, key, _prompts) for key in keys)
        name = str(self._setup.incarnation)
        self._queues = [Consumer(stream, ROLLOUT, name) for stream in streams]
        self._queue = None
        self._engines = self._setup.engines(command.spec.rollout)
        self._defers = command.spec.rollout.defer_long > 0
        self._dropped = []
        slots = command.spec.rollout.slots
        # then prompts wait until the ranks have chosen
        self._leaves_slots_open = slots == "auto"
        self.conversations.open(command)
        self._slots = 0 if slots == "auto" else slots * len(self._engines)
        self._taken.clear()

    def add_slots(self, event: SizesChosen) -> None:
        """Take prompts for a rank's engine, if the spec has left it to choose its slots."""
        if self._leaves_slots_open:
            self._slots += event.sizes.slots
            self._changed.set()

    def close(self) -> None:
        """Forget the job."""
        self._assignment = None
        self._queues, self._queue = [], None
        self._taken.clear()
        self.conversations.close()

    def start(self, command: StartRollout) -> None:
        """Take prompts until the queue is drained."""
        self._assignment = command
        number = queue_of(len(self._queues) > 1, command.purpose, command.step)
        self._queue = self._queues[number]
        self._share_until = time.monotonic() + self._share_seconds
        self._served = False
        self._changed.set()

    def stop(self) -> None:
        """Take no more prompts; those that were taken are still answered."""
        self._assignment = None
        self._interrupted.set()

    def finish(self, rollout: RolloutFinished | RolloutCut) -> TakenPrompt | None:
        """Return the prompt that the rollout answers; None if the worker has not taken it."""
        taken = self._taken.pop(_key(rollout), None)
        self.conversations.end(rollout)
        if taken is not None:
            self._changed.set()
            if not self._taken:
                self._interrupted.set()
                self.answered.set()
        return taken

    async def pull(self) -> None:
        """Take prompts as slots become free, and report when the worker idles."""
        while True:
            queue, assignment = self._queue, self._assignment
            left = self._share_until - time.monotonic()
            usable = 0 if assignment is None else _usable(self._slots, assignment, left > 0)
            # what waits for an environment needs no slot
            waiting = 0 if left > 0 else sum(map(self.conversations.is_waiting, self._taken))
            free = usable - (len(self._taken) - waiting)
            if (most := self.conversations.most) is not None:
                free = min(free, most - len(self._taken))
            if queue is None or assignment is None or free <= 0:
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left if left > 0 else None):
                        await self._changed.wait()
                continue
            block = _BLOCK_MS
            if self._served:
                block = _SERVED_BLOCK_MS if self._taken else None
            try:
                await self._blocking.identify()
                # what the last read has found
                for each in await queue.move_to_dead_letters(self._setup.keys.dead_letters):
                    _log.error("dead letter", entry=each.id, error=each.error)
                await queue.drop(self._dropped)
                self._dropped = []
                entries = await self._blocking.read(queue.read(free, block))
            except CONNECTION_ERRORS:
                self._blocking.reset()
                await asyncio.sleep(0.1)
                continue
            # ranks give back what is of another batch than the one that they have begun since
            if queue not in self._queues:
                continue
            # ranks would leave those of another job, and so the worker would never idle
            own = [entry for entry in entries if entry.message.job == assignment.job]
            if self.conversations.most is not None:
                # a second conversation would answer the first one's turns
                keys = {*self._taken}
                twice = [e for e in own if _key(e.message) in keys or keys.add(_key(e.message))]
                self._dropped += twice
                own = [entry for entry in own if entry not in twice]
            if self._defers and self._assignment is not None:
                step = self._assignment.step
                self._dropped += [e for e in own if _is_of_earlier_step(e.message, step)]
                own = [entry for entry in own if entry not in self._dropped]
            if own:
                self._hand_out(queue, own)
            elif entries or queue.unreadable:
                continue
            elif not self._taken and self._assignment is assignment:
                self._assignment = None
                self._outbox.post(_idled(assignment))

    async def wake(self) -> None:
        """End a blocking read when no prompts may be taken, or none is left to be answered."""
        while True:
            await self._interrupted.wait()
            self._interrupted.clear()
            await self._blocking.unblock()

    async def end(self) -> None:
        """End the environments, and close the connection."""
        self.conversations.close()
        await self._blocking.close()

    def _hand_out(
        self, queue: Consumer[PromptIssued], entries: Sequence[Entry[PromptIssued]]
    ) -> None:
        """Give neighbours, which often share a prompt, to one rank that has few prompts."""
        loads = dict.fromkeys(self._engines, 0)
        for taken in self._taken.values():
            loads[taken.rank] += 1
        each = -(-(len(self._taken) + len(entries)) // len(loads))
        batches: dict[int, list[PromptIssued]] = {rank: [] for rank in loads}
        for entry in entries:
            rank = next((r for r, load in loads.items() if load < each), 0)
            loads[rank] += 1
            batches[rank].append(entry.message)
            self._taken[_key(entry.message)] = TakenPrompt(queue, entry.id, rank)
        self._served = True
        self.answered.clear()
        for rank, batch in batches.items():
            if self.conversations.most is not None:
                for prompt in batch:
                    self.conversations.begin(self._engines[rank], prompt)
            elif batch:
                self._engines[rank].send(DecodePrompts(job=batch[0].job, prompts=tuple(batch)))


def _is_of_earlier_step(prompt: PromptIssued, step: Step) -> bool:
    return prompt.purpose == "train" and prompt.step < step


def _usable(slots: int, assignment: StartRollout, only_share: bool) -> int:
    return min(slots, assignment.share) if only_share else slots


def _idled(assignment: StartRollout) -> WorkerIdled:
    return WorkerIdled(
        job=assignment.job,
        epoch=assignment.epoch,
        step=assignment.step,
        attempt=Attempt(0),
        worker=assignment.worker,
        incarnation=assignment.incarnation,
        purpose=assignment.purpose,
        requeues=assignment.requeues,
    )


def _key(prompt: PromptIssued | RolloutFinished | RolloutCut) -> AnswerKey:
    return prompt.step, prompt.purpose, prompt.prompt, prompt.member
