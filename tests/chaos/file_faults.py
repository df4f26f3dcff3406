"""Tear files and flip bytes in them: blobs, answers, journals and snapshots."""

import re
from pathlib import Path

from tests.chaos.fault import Chaos, Fault, Healed, NotNow, stopped
from tests.chaos.process_faults import KILLS
from tests.chaos.session import NotRecovered, until
from tlt.base.id_types import JobId
from tlt.policies.run import coordinator
from tlt.protocol.events import AnyEvent, RolloutFinished
from tlt.runs.run_folder_reader import read_spec
from tlt.spec.config import JobSpec
from tlt.store.journal import FILE_NAME, Position, follow
from tlt.store.journal_replayed_state import SNAPSHOT_FILE, encode_snapshot
from tlt.store.message_codec import Codec
from tlt.store.redis_keys import REWARD

_events = Codec[AnyEvent](AnyEvent)
_BLOB = re.compile(r"[0-9a-f]{40}")
_WAIT_SECONDS = 15.0


def _damage_blobs(chaos: Chaos) -> Healed:
    """Damage the blobs in flight, and have fresh ranks read them."""
    flight = chaos.session.flight(chaos.job)
    blobs = [path for path in flight.glob("*") if _BLOB.fullmatch(path.name)]
    if not blobs:
        raise NotNow("no blobs in flight")
    for blob in blobs:
        if chaos.dice.random() < 0.5:
            blob.write_bytes(_flipped(chaos, blob.read_bytes()))
        else:
            _replace(blob, blob.read_bytes()[: chaos.dice.randrange(blob.stat().st_size)])
    return KILLS["kill a rank"](chaos)


def _flip_unread_answer(chaos: Chaos) -> Healed:
    """Flip a byte of an answer that the reward hasn't read: it must be left out by name."""
    session = chaos.session
    with stopped(session.services()[REWARD].pid):
        try:
            until(lambda: _unread(chaos), "an unread answer", _WAIT_SECONDS)
        except NotRecovered as error:
            raise NotNow("no unread answer") from error
        if not (unread := _unread(chaos)):
            raise NotNow("all answers are scored")
        answer = chaos.dice.choice(unread)
        path = session.run(chaos.job) / "answers" / answer.answer.file
        place = answer.answer.offset + chaos.dice.randrange(answer.answer.bytes)
        _flip_in_place(path, place, 1 << chaos.dice.randrange(8))
        chaos.damaged.add(
            (int(answer.step), answer.purpose, int(answer.prompt), int(answer.member))
        )
    return None


def _unread(chaos: Chaos) -> list[RolloutFinished]:
    redis, key = chaos.session.redis, chaos.session.keys.events
    groups = {g["name"].decode(): g for g in redis.xinfo_groups(key)}
    read = groups[REWARD]["last-delivered-id"].decode()
    events = [_events.decode(fields) for _, fields in redis.xrange(key, min=f"({read}")]
    return [e for e in events if isinstance(e, RolloutFinished) and e.job == chaos.job]


def _tear_uncommitted_tail(chaos: Chaos) -> Healed:
    """Leave the journal as a coordinator does that dies while it writes."""
    healed, journal = _dead_coordinator(chaos)
    lines = journal.read_bytes().splitlines(keepends=True)
    last = chaos.dice.choice(lines[-20:])
    tail = chaos.dice.choice((last, _flipped(chaos, last), last[: len(last) // 2]))
    with open(journal, "ab") as file:
        file.write(tail)
    return healed


def _damage_snapshot(chaos: Chaos) -> Healed:
    """Leave a snapshot with a wrong byte, or half of one; a journal this short has none yet."""
    session, run = chaos.session, chaos.session.run(chaos.job)
    spec, before = read_spec(run), session.committed(chaos.job)
    healed, _ = _dead_coordinator(chaos)
    whole = _snapshot(run, JobId(chaos.job), spec, before)
    damaged = _flipped(chaos, whole) if chaos.dice.random() < 0.7 else whole[: len(whole) // 2]
    (run / SNAPSHOT_FILE).write_bytes(damaged)
    return healed


def _snapshot(run: Path, job: JobId, spec: JobSpec, committed: Position) -> bytes:
    state, at = coordinator.new_run(job, spec), Position()
    for entry, after in follow(run / FILE_NAME):
        if after.entries > committed.entries:
            break
        state, _ = coordinator.decide(state, entry.event, entry.at)  # pyright: ignore
        at = after
    return encode_snapshot(at, state)


def _flip_committed_line(chaos: Chaos) -> Healed:
    """Flip a byte of the journal that counts: the job must end with an error that names it."""
    committed = chaos.session.committed(chaos.job).bytes
    if not committed:
        raise NotNow("nothing is committed")
    _, journal = _dead_coordinator(chaos)
    _flip_in_place(journal, chaos.dice.randrange(committed), 1 << chaos.dice.randrange(8))
    chaos.refusal = str(journal)
    return lambda: chaos.session.ended(chaos.job)


def _dead_coordinator(chaos: Chaos) -> tuple[Healed, Path]:
    journal = chaos.session.run(chaos.job) / FILE_NAME
    if not journal.exists():
        raise NotNow("no journal yet")
    return KILLS["kill the coordinator"](chaos), journal


def _flipped(chaos: Chaos, data: bytes) -> bytes:
    place = chaos.dice.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << chaos.dice.randrange(8))]) + data[place + 1 :]


def _flip_in_place(path: Path, place: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ bit]))


def _replace(path: Path, data: bytes) -> None:
    """Put a shorter file in place of one that processes may have mapped."""
    shorter = path.with_name(f".shorter-{path.name}")
    shorter.write_bytes(data)
    shorter.replace(path)


FILES: dict[str, Fault] = {
    "damage the blobs in flight": _damage_blobs,
    "flip a byte of an unread answer": _flip_unread_answer,
    "tear the journal's uncommitted tail": _tear_uncommitted_tail,
    "damage a snapshot": _damage_snapshot,
}
# a job that one of these hits must fail, and say why
REFUSED: dict[str, Fault] = {"flip a byte of the committed journal": _flip_committed_line}
