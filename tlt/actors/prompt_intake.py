"""What a worker takes from the shared queue, and which of its ranks has it in hand.

It takes as much as there are free slots, but leaves the others their parts when a round begins.
What they have not taken after a moment is anybody's. Once nothing is in hand, and a read of the
queue finds nothing either, the worker idles.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tlt.actors.rank_process import RankProcess
from tlt.ids import EntryId, Incarnation, Member, PromptIndex, Step
from tlt.protocol.commands import OpenJob, PromptIssued, StartRollout
from tlt.protocol.events import RolloutFinished
from tlt.ranks.worker_channel import Decode
from tlt.store.blocking_read import Waiter
from tlt.store.message_codec import Codec
from tlt.store.redis_connection import GONE, Connection
from tlt.store.redis_keys import ROLLOUT, Keys
from tlt.store.redis_stream import Consumer, Entry, Stream

# how long a read of the queue may block, if nothing ends it before
_BLOCK_MS = 100
# all are told at once that a round begins; who trains stops first
_POLITE_SECONDS = 1.0

_PromptKey = tuple[Step, str, PromptIndex, Member]
_prompts = Codec[PromptIssued](PromptIssued)


class Taken(NamedTuple):
    queue: Consumer[PromptIssued]
    entry: EntryId
    rank: int


class PromptIntake:
    def __init__(
        self,
        connection: Connection,
        keys: Keys,
        incarnation: Incarnation,
        ranks: Sequence[RankProcess],
        idle: Callable[[StartRollout], None],
        polite_seconds: float = _POLITE_SECONDS,
    ) -> None:
        self._keys = keys
        self._incarnation = incarnation
        self._ranks = ranks
        self._idle = idle
        self._polite_seconds = polite_seconds
        self._waiter = Waiter(connection)
        self._queue: Consumer[PromptIssued] | None = None
        self._slots = 0
        # so much is this worker's part, and until when others are left theirs
        self._share = 0
        self._polite_until = 0.0
        self._assignment: StartRollout | None = None
        self._taken: dict[_PromptKey, Taken] = {}
        # whether anything was handed out since it was last told to roll out
        self._served = False
        self._changed = asyncio.Event()
        # nothing is in hand any more
        self._emptied = asyncio.Event()

    @property
    def busy(self) -> set[int]:
        """Ranks that have something in hand."""
        return {taken.rank for taken in self._taken.values()}

    def open(self, command: OpenJob) -> None:
        stream = Stream(self._waiter.connection, self._keys.prompts(command.job), _prompts)
        self._queue = Consumer(stream, ROLLOUT, str(self._incarnation))
        self._slots = command.spec.rollout.slots * len(self._ranks)
        self._taken.clear()

    def close(self) -> None:
        self._assignment = None
        self._queue = None
        self._taken.clear()

    def start(self, command: StartRollout) -> None:
        self._assignment = command
        self._share = command.share
        self._polite_until = time.monotonic() + self._polite_seconds
        self._served = False
        self._changed.set()

    def stop(self) -> None:
        """What is in hand is finished; no more is taken."""
        self._assignment = None

    def finished(self, rollout: RolloutFinished) -> Taken | None:
        """None where it was not in hand."""
        taken = self._taken.pop(_key(rollout), None)
        if taken is not None:
            self._changed.set()
            if not self._taken:
                self._emptied.set()
        return taken

    async def pull(self) -> None:
        while True:
            queue, assignment = self._queue, self._assignment
            polite = self._polite_until - time.monotonic()
            room = min(self._slots, self._share) if polite > 0 else self._slots
            free = room - len(self._taken)
            if queue is None or assignment is None or free <= 0:
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(polite if polite > 0 else None):
                        await self._changed.wait()
                continue
            drained = self._served and not self._taken
            try:
                await self._waiter.ready()
                entries = await queue.read(free, None if drained else _BLOCK_MS)
            except GONE:
                self._waiter.lost()
                await asyncio.sleep(0.1)
                continue
            if queue is not self._queue:
                continue
            if entries:
                self._hand_out(queue, entries)
            elif not self._taken and self._assignment is assignment:
                self._assignment = None
                self._idle(assignment)

    async def wake(self) -> None:
        """Once nothing is in hand, it is known that nothing is left: the read would have got it."""
        while True:
            await self._emptied.wait()
            self._emptied.clear()
            await self._waiter.wake()

    async def end(self) -> None:
        await self._waiter.close()

    def _hand_out(
        self, queue: Consumer[PromptIssued], entries: Sequence[Entry[PromptIssued]]
    ) -> None:
        """Neighbours share a prompt: a run of them goes to one rank that has little to do."""
        loads = [0] * len(self._ranks)
        for taken in self._taken.values():
            loads[taken.rank] += 1
        each = -(-(len(self._taken) + len(entries)) // len(self._ranks))
        batches: list[list[PromptIssued]] = [[] for _ in self._ranks]
        for entry in entries:
            rank = next((r for r, load in enumerate(loads) if load < each), 0)
            loads[rank] += 1
            batches[rank].append(entry.message)
            self._taken[_key(entry.message)] = Taken(queue, entry.id, rank)
        self._served = True
        for rank, batch in zip(self._ranks, batches, strict=True):
            if batch:
                rank.send(Decode(prompts=tuple(batch)))


def _key(prompt: PromptIssued | RolloutFinished) -> _PromptKey:
    return prompt.step, prompt.purpose, prompt.prompt, prompt.member
