"""What a coordinator that comes up finds of the time before: who is gone, and what still waits.

Its session may have ended in between, and the shared memory with it. What workers wrote until then
is in the stream. Their answers are decided first: the prompts were acknowledged with them, so one
that does not count now never will. Then those who are gone are lost, before anything else that they
said: it may be about weights that are gone as well, and losses end the update that it is about.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from tlt.blobs import Blobs
from tlt.errors import BlobLost
from tlt.ids import EntryId, Incarnation, WorkerId
from tlt.policies.job.run_state import RunState
from tlt.protocol.events import AnyEvent, RolloutDropped, RolloutFinished, WorkerJoined, WorkerLost
from tlt.protocol.records import Heartbeat, WorkerInfo
from tlt.store.redis_connection import Connection
from tlt.store.redis_keys import Keys
from tlt.store.redis_stream import Consumer, Entry

_PAGE = 512
Beats = Mapping[WorkerId, Heartbeat]


class Waiting(NamedTuple):
    # decided first
    answers: list[Entry[RolloutFinished]]
    # decided last
    rest: list[Entry[AnyEvent]]
    # acknowledged only: whoever joined there was gone before anybody heard of it
    void: list[EntryId]


async def beats_of(connection: Connection, keys: Keys) -> dict[WorkerId, Heartbeat]:
    raw = await connection.hgetall(keys.heartbeats)
    return {
        WorkerId(worker.decode()): msgspec.msgpack.decode(beat, type=Heartbeat)
        for worker, beat in raw.items()
    }


async def waiting(consumer: Consumer[AnyEvent], beats: Beats) -> Waiting:
    found = Waiting([], [], [])
    while entries := await consumer.read(_PAGE, None):
        for entry in entries:
            event = entry.message
            if isinstance(event, RolloutFinished):
                found.answers.append(Entry(entry.id, event))
            elif isinstance(event, WorkerJoined) and _is_void(event, beats):
                found.void.append(entry.id)
            else:
                found.rest.append(entry)
    return found


def gone(
    workers: Mapping[WorkerId, WorkerInfo], run: RunState | None, beats: Beats
) -> list[WorkerLost]:
    """Nobody beats for these lives: of known workers, and of those whose next life is awaited."""
    lives = {
        worker: info.incarnation
        for worker, info in workers.items()
        if _is_over(beats.get(worker), info.incarnation)
    }
    if run is not None:
        lives |= {
            worker: run.newest_incarnations[worker]
            for worker in run.returning_workers
            if worker not in beats
        }
    return [
        WorkerLost(
            worker=worker,
            incarnation=incarnation,
            reason="its session went down",
            returning=False,
            with_session=True,
        )
        for worker, incarnation in lives.items()
    ]


def unsaid(losses: Sequence[WorkerLost], rest: Sequence[Entry[AnyEvent]]) -> list[WorkerLost]:
    """Who said so itself lives on, and is heard in its turn."""
    said = {
        (entry.message.worker, entry.message.incarnation)
        for entry in rest
        if isinstance(entry.message, WorkerLost)
    }
    return [lost for lost in losses if (lost.worker, lost.incarnation) not in said]


def answered(rollout: RolloutFinished, blobs: Blobs) -> RolloutFinished | RolloutDropped:
    """It may have been too long for a message, and lost with the shared memory.

    Of an evaluation only the text counts.
    """
    try:
        for tensor in (rollout.tokens, rollout.logprobs):
            if tensor.blob is not None and rollout.purpose == "train":
                blobs.path(tensor.blob)
    except BlobLost as error:
        return RolloutDropped(
            job=rollout.job,
            epoch=rollout.epoch,
            step=rollout.step,
            attempt=rollout.attempt,
            purpose=rollout.purpose,
            prompt=rollout.prompt,
            member=rollout.member,
            reason=str(error),
        )
    return rollout


def _is_over(beat: Heartbeat | None, incarnation: Incarnation) -> bool:
    """If any beats, it is a later life: a process that has just started has no number yet."""
    return beat is None or beat.incarnation == 0 or beat.incarnation > incarnation


def _is_void(joined: WorkerJoined, beats: Beats) -> bool:
    beat = beats.get(joined.info.worker)
    return beat is None or beat.incarnation > joined.info.incarnation
