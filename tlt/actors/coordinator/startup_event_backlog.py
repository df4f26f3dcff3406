"""Find lost workers and unread events when a coordinator starts, and order them.

The session may have ended before, and the shared memory with it. Unread answers are decided first:
their prompts were acknowledged with them, so an answer that isn't counted now is never counted. The
losses of workers come next and all other events last, because those may name weights that are lost
as well, and a loss ends the update that they belong to.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from tlt.actors.coordinator.redis_effects import drop
from tlt.base.id_types import EntryId, Incarnation, WorkerId
from tlt.blobs.answer_files import AnswerFiles
from tlt.errors import BlobLost
from tlt.protocol.events import (
    AnyEvent,
    RolloutCut,
    RolloutDropped,
    RolloutFinished,
    WorkerJoined,
    WorkerLost,
)
from tlt.protocol.shared_values import Heartbeat, WorkerInfo
from tlt.store.redis_stream import Consumer, Entry

_PAGE = 512
Heartbeats = Mapping[WorkerId, Heartbeat]
AnswerEntry = Entry[RolloutFinished | RolloutCut]


class Unread(NamedTuple):
    answers: list[AnswerEntry]
    others: list[Entry[AnyEvent]]
    # joins of workers that were lost again before they were read; acknowledged without a decision
    void: list[EntryId]


async def read_unread(consumer: Consumer[AnyEvent], heartbeats: Heartbeats) -> Unread:
    unread = Unread([], [], [])
    while entries := await consumer.read(_PAGE, None):
        for entry in entries:
            event = entry.message
            if isinstance(event, RolloutFinished | RolloutCut):
                unread.answers.append(Entry(entry.id, event))
            elif isinstance(event, WorkerJoined) and _is_void(event, heartbeats):
                unread.void.append(entry.id)
            else:
                unread.others.append(entry)
    return unread


def lost_workers(
    workers: Mapping[WorkerId, WorkerInfo],
    awaited: Mapping[WorkerId, Incarnation],
    heartbeats: Heartbeats,
) -> list[WorkerLost]:
    """Return the losses of incarnations without a heartbeat.

    They are incarnations of known workers, and incarnations whose successors are awaited.
    """
    incarnations = {
        worker: info.incarnation
        for worker, info in workers.items()
        if _is_over(heartbeats.get(worker), info.incarnation)
    }
    incarnations |= {
        worker: incarnation for worker, incarnation in awaited.items() if worker not in heartbeats
    }
    return [
        WorkerLost(
            worker=worker,
            incarnation=incarnation,
            reason="it ended with its session or with Ray",
            returning=False,
            with_session=True,
        )
        for worker, incarnation in incarnations.items()
    ]


def unreported(losses: Sequence[WorkerLost], unread: Sequence[Entry[AnyEvent]]) -> list[WorkerLost]:
    """Return the losses that no unread event reports, because a reporting worker isn't lost."""
    reported = {
        (entry.message.worker, entry.message.incarnation)
        for entry in unread
        if isinstance(entry.message, WorkerLost)
    }
    return [lost for lost in losses if (lost.worker, lost.incarnation) not in reported]


def drop_if_lost(
    answer: RolloutFinished | RolloutCut, answers: AnswerFiles
) -> RolloutFinished | RolloutCut | RolloutDropped:
    """Replace an answer that was lost with its machine before it was written to the disk."""
    if answer.answer is None:
        return answer
    try:
        answers.read(answer.answer)
    except BlobLost as error:
        if isinstance(answer, RolloutCut):
            return msgspec.structs.replace(answer, answer=None)
        return drop(answer, str(error))
    return answer


def _is_over(heartbeat: Heartbeat | None, incarnation: Incarnation) -> bool:
    """Return True unless this incarnation or an earlier one beats; 0 is a worker without any."""
    return heartbeat is None or heartbeat.incarnation == 0 or heartbeat.incarnation > incarnation


def _is_void(joined: WorkerJoined, heartbeats: Heartbeats) -> bool:
    heartbeat = heartbeats.get(joined.info.worker)
    return heartbeat is None or heartbeat.incarnation > joined.info.incarnation
