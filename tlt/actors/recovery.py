"""What a coordinator that comes up finds of the time before: who is gone, and what still waits.

A session may have ended in between, and its shared memory with it. What workers wrote until then is
in the stream; their prompts were acknowledged with it, so an answer that does not count now never
will. Everything else of somebody who is gone is made again.
"""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from tlt.blobs import Blobs
from tlt.errors import BlobLost
from tlt.messages import (
    AnyEvent,
    Heartbeat,
    RolloutDropped,
    RolloutFinished,
    WorkerInfo,
    WorkerJoined,
    WorkerLost,
)
from tlt.policies.run_state import RunState
from tlt.store.connection import Connection
from tlt.store.keys import Keys
from tlt.store.stream import Consumer, Entry
from tlt.types import EntryId, Incarnation, WorkerId

_PAGE = 512
Beats = Mapping[WorkerId, Heartbeat]


class Waiting(NamedTuple):
    # to be decided before anybody is said to be gone, and all that is left after that
    answers: list[Entry[RolloutFinished]]
    rest: list[Entry[AnyEvent]]
    # of those who joined, and were gone before anybody heard of it
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
            elif isinstance(event, WorkerJoined) and _is_gone(
                beats.get(event.info.worker), event.info.incarnation
            ):
                found.void.append(entry.id)
            else:
                found.rest.append(entry)
    return found


def gone(
    workers: Mapping[WorkerId, WorkerInfo], run: RunState | None, beats: Beats
) -> list[WorkerLost]:
    """Nobody beats for them, and nobody will: those that are known, and those that were awaited."""
    lives = {worker: info.incarnation for worker, info in workers.items()}
    if run is not None:
        lives = {worker: run.newest[worker] for worker in run.returning} | lives
    return [
        WorkerLost(
            worker=worker,
            incarnation=incarnation,
            reason="its session went down",
            returning=False,
            with_session=True,
        )
        for worker, incarnation in lives.items()
        if _is_gone(beats.get(worker), incarnation)
    ]


def answered(rollout: RolloutFinished, blobs: Blobs) -> RolloutFinished | RolloutDropped:
    """It may have been too long for a message, and lost with the shared memory."""
    try:
        for tensor in (rollout.tokens, rollout.logprobs):
            if tensor.blob is not None:
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


def _is_gone(beat: Heartbeat | None, incarnation: Incarnation) -> bool:
    """A worker that has only just started beats before it has a number."""
    return beat is None or beat.incarnation == 0 or beat.incarnation > incarnation
