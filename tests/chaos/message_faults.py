"""Double, delay and misdirect messages in the real Redis, as its clients could see them.

Streams deliver at least once. A transaction whose reply is lost is sent again, so whatever was in
it may stand in a stream twice: events, prompts and commands. An entry that was handed out and not
acknowledged comes again. Producers run side by side, so their events may come in any order; those
of one incarnation of a worker stand between its `WorkerJoined` and its `WorkerLost`, which the
fence ensures, and these faults keep. An entry that Redis has acknowledged to its writer is not
lost, and no fault here loses one.
"""

import time
from typing import Any

from tests.chaos.fault import Chaos, Fault, Healed, NotNow, stopped
from tests.chaos.session import NotRecovered, until
from tlt.base.id_types import JobId
from tlt.errors import StoreError
from tlt.protocol.events import AnyEvent, WorkerJoined, WorkerLost
from tlt.store.message_codec import Codec, Fields
from tlt.store.redis_keys import COORDINATOR, REWARD
from tlt.store.redis_stream import reply_entries

_events = Codec[AnyEvent](AnyEvent)
_WAIT_SECONDS, _LATE_SECONDS = 10.0, 3.0
_SOME = 6


def _double_events(chaos: Chaos) -> Healed:
    """Add some of the last events again, of any kind."""
    redis, key = chaos.session.redis, chaos.session.keys.events
    recent = redis.xrevrange(key, count=50)
    if not recent:
        raise NotNow("no events")
    for _, fields in chaos.dice.sample(recent, min(_SOME, len(recent))):
        redis.xadd(key, fields)
    return None


def _double_prompts(chaos: Chaos) -> Healed:
    """Add some prompts again that nobody has taken yet, or that are being answered."""
    redis, key = chaos.session.redis, chaos.session.keys.prompts(JobId(chaos.job))
    waiting = redis.xrange(key)
    if not waiting:
        raise NotNow("no prompts")
    for _, fields in chaos.dice.sample(waiting, min(_SOME, len(waiting))):
        redis.xadd(key, fields)
    return None


def _double_command(chaos: Chaos) -> Healed:
    """Send a worker its next command twice."""
    session, redis = chaos.session, chaos.session.redis
    streams = {
        session.keys.commands(worker, beat.incarnation): "$"
        for worker, beat in session.workers().items()
    }
    found = redis.xread(streams, count=1, block=round(_WAIT_SECONDS * 1000))
    if not found:
        raise NotNow("no commands")
    for key, entries in found:
        for _, fields in entries:
            redis.xadd(key, fields)
    return None


def _late_events(chaos: Chaos) -> Healed:
    """Hold back some events that nobody has read, and add them after later ones."""
    session, redis = chaos.session, chaos.session.redis
    services = session.services()
    with stopped(*(services[name].pid for name in (COORDINATOR, REWARD))):
        try:
            until(lambda: _movable(chaos), "events to hold back", _WAIT_SECONDS)
        except NotRecovered as error:
            raise NotNow("no events that could be late") from error
        movable = _movable(chaos)
        if not movable:
            raise NotNow("no events that could be late")
        held = chaos.dice.sample(movable, min(_SOME, len(movable)))
        redis.xdel(session.keys.events, *(id_ for id_, _ in held))
    last = redis.xinfo_stream(session.keys.events)["last-generated-id"]
    deadline = time.monotonic() + _LATE_SECONDS
    while time.monotonic() < deadline:
        later = reply_entries(redis.xread({session.keys.events: last}, count=1, block=200))
        if any(not _moves(fields) for _, fields in later):
            break  # its worker is about to join or to be lost
    for _, fields in held:
        redis.xadd(session.keys.events, fields)
    return None


def _movable(chaos: Chaos) -> list[tuple[bytes, Fields]]:
    """Return the events that neither group has read, up to one that must stand where it is."""
    redis, key = chaos.session.redis, chaos.session.keys.events
    groups = {g["name"].decode(): g["last-delivered-id"].decode() for g in redis.xinfo_groups(key)}
    read = max((groups[name] for name in (COORDINATOR, REWARD)), key=_position)
    found: list[tuple[bytes, Fields]] = []
    for id_, fields in redis.xrange(key, min=f"({read}"):
        if not _moves(fields):
            break
        found.append((id_, fields))
    return found


def _moves(fields: Fields) -> bool:
    try:
        return not isinstance(_events.decode(fields), WorkerJoined | WorkerLost)
    except StoreError:
        return False


def _position(id_: str) -> tuple[int, int]:
    milliseconds, _, sequence = id_.partition("-")
    return int(milliseconds), int(sequence)


def _lose_deliveries(group: str) -> Fault:
    """Have Redis hand out entries under a reader's name that the reader never sees."""

    def inject(chaos: Chaos) -> Healed:
        redis, key = chaos.session.redis, chaos.session.keys.events
        taken: list[Any] = []
        deadline = time.monotonic() + _WAIT_SECONDS
        while not taken and time.monotonic() < deadline:
            taken = reply_entries(
                redis.xreadgroup(group, group, {key: ">"}, count=_SOME, block=500)
            )
        if not taken:
            raise NotNow("no events")
        return None

    return inject


def _cut_connections(chaos: Chaos) -> Healed:
    """Close every connection to Redis: replies that are on their way are lost."""
    chaos.session.redis.client_kill_filter(_type="normal", skipme=True)
    return None


MESSAGES: dict[str, Fault] = {
    "double events": _double_events,
    "double prompts": _double_prompts,
    "double a command": _double_command,
    "hold back events": _late_events,
    "lose deliveries to the coordinator": _lose_deliveries(COORDINATOR),
    "lose deliveries to the reward scorer": _lose_deliveries(REWARD),
    "cut all connections to Redis": _cut_connections,
}
