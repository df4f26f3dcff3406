"""How the streams and the workers of a session are, read from Redis and nowhere written."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import redis.exceptions

from tlt.config import SessionSpec
from tlt.dashboard.rollout_tail import Held, Holding
from tlt.errors import StoreError
from tlt.ids import Incarnation, JobId, WorkerId
from tlt.protocol.commands import PromptIssued
from tlt.protocol.records import Heartbeat
from tlt.store.message_codec import Codec
from tlt.store.redis_connection import GONE, Connection
from tlt.store.redis_keys import ROLLOUT, Keys

# of answers in hand: told with who has them, and with their age alone
_LONGEST = 32
_AGES = 128
# dead letters that are told
_DEAD = 3
_LISTED = 128
_codec = Codec[PromptIssued](PromptIssued)
_Answer = TypeVar("_Answer")


class StreamHealth(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    # None where the stream is read without one
    group: str | None
    depth: int
    # delivered and not acknowledged
    pending: int = 0
    # something was not yet delivered
    unread: bool = False
    # of what is not acknowledged
    oldest_seconds: float = 0.0


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    error: str
    seconds: float


class WorkerHealth(msgspec.Struct, frozen=True, kw_only=True):
    worker: WorkerId
    incarnation: Incarnation
    ranks: int
    running: int
    job: JobId | None
    # since its heartbeat last changed, by our own clock
    silent_seconds: float
    memory_bytes: int
    pid: int


class Health(msgspec.Struct, frozen=True, kw_only=True):
    # Redis does not answer
    error: str | None = None
    # it holds something that cannot be read, which is left out
    odd: str | None = None
    lease_seconds: float = 0.0
    streams: tuple[StreamHealth, ...] = ()
    # the most urgent first, where they are too many to tell all
    workers: tuple[WorkerHealth, ...] = ()
    all_workers: int = 0
    # of all: silent for half a lease or longer, and without a rank
    silent: int = 0
    rankless: int = 0
    running: int = 0
    dead_letters: int = 0
    # the newest first
    dead: tuple[DeadLetter, ...] = ()
    redis_bytes: int = 0
    memory_used: int = 0
    memory_total: int = 0
    load: float = 0.0


class Watcher:
    """Remembers when each heartbeat last changed."""

    def __init__(self, connection: Connection, session: SessionSpec) -> None:
        self._connection = connection
        self._session = session
        self._keys = Keys(session.name)
        self._beats: dict[WorkerId, Heartbeat] = {}
        self._seen: dict[WorkerId, tuple[tuple[int, int], float]] = {}
        self._prompts: dict[bytes, PromptIssued] = {}
        self._odd: str | None = None

    async def look(self, job: JobId | None) -> tuple[Health, Holding | None]:
        """With the answers of the running job that are being written, where that is known."""
        try:
            return await self._look(job)
        except (*GONE, redis.exceptions.RedisError) as error:
            lease = self._session.lease_seconds
            return Health(error=str(error), lease_seconds=lease), None

    async def _look(self, job: JobId | None) -> tuple[Health, Holding | None]:
        self._odd = None
        keys = self._keys
        named = {"events": keys.events}
        if job is not None:
            named |= {"prompts": keys.prompts(job), "growing": keys.growing(job)}
        beats, dead, memory, *found = await self._ask(
            lambda pipe: [
                pipe.hgetall(keys.heartbeats),
                pipe.xlen(keys.dead_letters),
                pipe.info("memory"),
                *(
                    question
                    for key in named.values()
                    for question in (pipe.xlen(key), pipe.xinfo_groups(key))
                ),
            ]
        )
        lengths, groups = found[::2], found[1::2]
        self._see(self._expected(beats, "heartbeats", dict[bytes, bytes]()))
        streams: list[StreamHealth] = []
        holding: Holding | None = None
        for (name, key), depth, known in zip(named.items(), lengths, groups, strict=True):
            if not isinstance(known, list):
                continue  # not there, or no longer
            streams += await self._streams(name, key, depth, known)
            if name == "prompts" and known:
                holding = await self._in_hand(key, int(known[0]["pending"]))
        told = self._told()
        streams += await self._commands(told)
        used, total = _machine_memory()
        health = Health(
            odd=self._odd,
            lease_seconds=self._session.lease_seconds,
            streams=tuple(streams),
            workers=tuple(self._worker(*each) for each in told),
            all_workers=len(self._beats),
            silent=sum(map(self._is_silent, self._beats)),
            rankless=sum(
                not beat.rank_pids and not self._is_silent(worker)
                for worker, beat in self._beats.items()
            ),
            running=sum(beat.running for beat in self._beats.values()),
            dead_letters=self._expected(dead, "dead letters", 0),
            dead=await self._dead() if dead else (),
            redis_bytes=self._expected(memory, "INFO", {"used_memory": 0})["used_memory"],
            memory_used=used,
            memory_total=total,
            load=round(os.getloadavg()[0], 2),
        )
        return health, holding

    async def _ask(self, questions: Callable[[Any], object]) -> list[Any]:
        """In one trip; a question about what is not there is answered by its error."""
        async with self._connection.pipeline(transaction=False) as pipe:
            questions(pipe)
            answers: list[Any] = await pipe.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, GONE):
                raise answer
        return answers

    def _see(self, raw: dict[bytes, bytes]) -> None:
        self._beats = {}
        for name, beat in raw.items():
            try:
                worker = WorkerId(name.decode())
                self._beats[worker] = msgspec.msgpack.decode(beat, type=Heartbeat)
            except ValueError as error:  # msgspec's own, or a name that is no text
                self._odd = f"the heartbeat of {name!r}: {error}"
        now = time.monotonic()
        for worker, beat in self._beats.items():
            pulse = beat.incarnation, beat.counter
            if worker not in self._seen or self._seen[worker][0] != pulse:
                self._seen[worker] = pulse, now

    async def _streams(
        self, name: str, key: str, depth: int, groups: list[dict[str, Any]]
    ) -> list[StreamHealth]:
        if not groups:
            return [StreamHealth(name=name, group=None, depth=depth)]
        answers = await self._ask(
            lambda pipe: [
                question
                for group in groups
                for question in (
                    pipe.xpending_range(key, group["name"], min="-", max="+", count=1),
                    pipe.xrange(key, min=f"({group['last-delivered-id'].decode()}", count=1),
                )
            ]
        )
        found: list[StreamHealth] = []
        for group, pending, unread in zip(groups, answers[::2], answers[1::2], strict=True):
            oldest = [row["message_id"] for row in pending] + [id_ for id_, _ in unread]
            found.append(
                StreamHealth(
                    name=name,
                    group=group["name"].decode(),
                    depth=depth,
                    pending=int(group["pending"]),
                    unread=bool(unread),
                    oldest_seconds=round(max(map(_age, oldest), default=0.0), 1),
                )
            )
        return found

    def _expected(self, answer: Any, what: str, otherwise: _Answer) -> _Answer:
        """Or that, where a question was answered by an error."""
        if isinstance(answer, type(otherwise)):
            return answer
        self._odd = f"{what}: {answer}"
        return otherwise

    async def _commands(self, workers: Sequence[tuple[WorkerId, Heartbeat]]) -> list[StreamHealth]:
        """Those of the workers that are told, as one: each deletes what it has obeyed."""
        keys = [self._keys.commands(worker, beat.incarnation) for worker, beat in workers]
        if not keys:
            return []
        depths = await self._ask(lambda pipe: [pipe.xlen(key) for key in keys])
        waiting = [key for key, depth in zip(keys, depths, strict=True) if depth][:_LONGEST]
        oldest: list[Any] = []
        if waiting:
            oldest = await self._ask(lambda pipe: [pipe.xrange(key, count=1) for key in waiting])
        ids = [entries[0][0] for entries in oldest if isinstance(entries, list) and entries]
        return [
            StreamHealth(
                name="commands",
                group="each worker",
                depth=sum(depth for depth in depths if isinstance(depth, int)),
                unread=bool(ids),
                oldest_seconds=round(max(map(_age, ids), default=0.0), 1),
            )
        ]

    async def _dead(self) -> tuple[DeadLetter, ...]:
        [entries] = await self._ask(
            lambda pipe: pipe.xrevrange(self._keys.dead_letters, count=_DEAD)
        )
        if not isinstance(entries, list):
            return ()
        return tuple(
            DeadLetter(
                source=fields.get(b"source", b"?").decode(errors="replace"),
                error=fields.get(b"error", b"?").decode(errors="replace"),
                seconds=round(_age(id_), 1),
            )
            for id_, fields in entries
        )

    async def _in_hand(self, key: str, running: int) -> Holding | None:
        """Entries are read in their order, so that the first have been in hand the longest."""
        [rows] = await self._ask(
            lambda pipe: pipe.xpending_range(key, ROLLOUT, min="-", max="+", count=_AGES)
        )
        if not isinstance(rows, list):
            return None
        ages = sorted((row["time_since_delivered"] / 1000 for row in rows), reverse=True)
        rows = sorted(rows, key=lambda row: -row["time_since_delivered"])[:_LONGEST]
        ids = [row["message_id"] for row in rows]
        self._prompts = {id_: self._prompts[id_] for id_ in ids if id_ in self._prompts}
        unknown = [id_ for id_ in ids if id_ not in self._prompts]
        if unknown:
            answers = await self._ask(
                lambda pipe: [pipe.xrange(key, min=id_, max=id_) for id_ in unknown]
            )
            for id_, entries in zip(unknown, answers, strict=True):
                self._learn(id_, entries)
        owners = {str(beat.incarnation): worker for worker, beat in self._beats.items()}
        held = [
            Held(
                prompt=prompt.prompt,
                member=prompt.member,
                worker=owners.get(row["consumer"].decode(errors="replace")),
                seconds=row["time_since_delivered"] / 1000,
                attempt=prompt.attempt,
            )
            for row in rows
            if (prompt := self._prompts.get(row["message_id"])) is not None
        ]
        return Holding(longest=tuple(held), ages=tuple(ages), running=running)

    def _learn(self, id_: bytes, entries: Any) -> None:
        try:
            for _, fields in entries:
                self._prompts[id_] = _codec.decode(fields)
        except (StoreError, TypeError) as error:  # or no entries: an error is the answer
            self._odd = f"the prompt {id_.decode()}: {error}"

    def _told(self) -> list[tuple[WorkerId, Heartbeat]]:
        beats = sorted(self._beats.items(), key=lambda each: natural(each[0]))
        if len(beats) <= _LISTED:
            return beats
        beats.sort(key=lambda each: (not self._is_silent(each[0]), bool(each[1].rank_pids)))
        return beats[:_LISTED]

    def _silent_seconds(self, worker: WorkerId) -> float:
        return time.monotonic() - self._seen[worker][1]

    def _is_silent(self, worker: WorkerId) -> bool:
        return self._silent_seconds(worker) > self._session.lease_seconds / 2

    def _worker(self, worker: WorkerId, beat: Heartbeat) -> WorkerHealth:
        return WorkerHealth(
            worker=worker,
            incarnation=beat.incarnation,
            ranks=len(beat.rank_pids),
            running=beat.running,
            job=beat.job,
            silent_seconds=round(self._silent_seconds(worker), 1),
            memory_bytes=beat.resident_bytes,
            pid=beat.pid,
        )


def natural(worker: WorkerId) -> tuple[int, str]:
    return len(worker), worker


def _age(entry: bytes) -> float:
    """An entry's number begins with the time at which it was added."""
    return max(0.0, time.time() - int(entry.split(b"-")[0]) / 1000)


def _machine_memory() -> tuple[int, int]:
    """Used and all, in bytes."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        total, free = (int(lines[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return 0, 0
    return total - free, total
