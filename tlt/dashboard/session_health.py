"""Health of a session's streams and workers, read from Redis without writing to it."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import redis.exceptions

from tlt.base.id_types import Incarnation, JobId, WorkerId
from tlt.dashboard.rollout_tail import RunningAnswer, RunningAnswers
from tlt.errors import StoreError
from tlt.protocol.commands import PromptIssued
from tlt.protocol.shared_values import Heartbeat, ServiceHeartbeat
from tlt.spec.config import SessionSpec
from tlt.store.message_codec import Codec
from tlt.store.redis_connection import CONNECTION_ERRORS, Connection
from tlt.store.redis_keys import ROLLOUT, Keys, prompt_queues
from tlt.store.redis_memory import from_info

# running answers that are read with prompt and worker, and those of which only the age is read
_LONGEST = 32
_AGES = 128
_DEAD_LETTERS = 3
_LISTED_WORKERS = 128
_codec = Codec[PromptIssued](PromptIssued)
_Reply = TypeVar("_Reply")


class StreamHealth(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    # the job that it belongs to, if it belongs to one
    job: JobId | None = None
    # None where the stream is read without a consumer group
    group: str | None
    depth: int
    # delivered and not acknowledged
    pending: int = 0
    # at least one entry is not delivered yet
    unread: bool = False
    # age of the oldest entry that is not acknowledged
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
    # why Redis does not answer
    error: str | None = None
    # something in Redis that cannot be read and is left out
    unreadable: str | None = None
    lease_seconds: float = 0.0
    streams: tuple[StreamHealth, ...] = ()
    # where they are too many to list all, those in trouble are listed
    workers: tuple[WorkerHealth, ...] = ()
    all_workers: int = 0
    # counted over all workers: silent for half a lease or longer, and not silent but without a rank
    silent: int = 0
    rankless: int = 0
    running: int = 0
    dead_letters: int = 0
    # newest first
    newest_dead_letters: tuple[DeadLetter, ...] = ()
    redis_bytes: int = 0
    # what Redis or the coordinator can't write, and what to do about it
    waits: tuple[str, ...] = ()
    memory_used: int = 0
    memory_total: int = 0
    load: float = 0.0


class HealthReader:
    """Reads the health of a session, and remembers when each heartbeat last changed."""

    def __init__(self, connection: Connection, session: SessionSpec) -> None:
        self._connection = connection
        self._session = session
        self._keys = Keys(session.name)
        self.heartbeats: dict[WorkerId, Heartbeat] = {}
        # incarnation and counter of the newest heartbeat, and when it was first seen
        self._changed: dict[WorkerId, tuple[tuple[int, int], float]] = {}
        # of the longest running answers, by the stream and the entry
        self._prompts: dict[tuple[str, bytes], PromptIssued] = {}
        self._unreadable: str | None = None

    async def read(self, jobs: Sequence[JobId]) -> tuple[Health, dict[JobId, RunningAnswers]]:
        """Return the health, and the running answers of these jobs where they are known."""
        try:
            return await self._read(jobs)
        except (*CONNECTION_ERRORS, redis.exceptions.RedisError) as error:
            lease = self._session.lease_seconds
            return Health(error=str(error), lease_seconds=lease), {}

    async def _read(self, jobs: Sequence[JobId]) -> tuple[Health, dict[JobId, RunningAnswers]]:
        self._unreadable = None
        keys = self._keys
        named: dict[str, tuple[str, JobId | None]] = {keys.events: ("events", None)}
        for job in jobs:
            for queue in prompt_queues(1):
                name = f"prompts {queue}" if queue else "prompts"
                named[keys.prompts(job, queue)] = name, job
            named[keys.partial_answers(job)] = "partial answers", job
        heartbeats, services, dead_letters, memory, persistence, *replies = await self._query(
            lambda pipe: [
                pipe.hgetall(keys.heartbeats),
                pipe.hgetall(keys.services),
                pipe.xlen(keys.dead_letters),
                pipe.info("memory"),
                pipe.info("persistence"),
                *(query for key in named for query in (pipe.xlen(key), pipe.xinfo_groups(key))),
            ]
        )
        self._update_heartbeats(self._checked(heartbeats, "heartbeats", dict[bytes, bytes]()))
        streams: list[StreamHealth] = []
        answers: dict[JobId, RunningAnswers] = {}
        for (key, (name, job)), depth, groups in zip(
            named.items(), replies[::2], replies[1::2], strict=True
        ):
            if not isinstance(groups, list):
                continue  # the stream doesn't exist (any more)
            of_job = await self._streams(name, key, depth, groups)
            streams += [msgspec.structs.replace(each, job=job) for each in of_job]
            if name.startswith("prompts") and job is not None and groups:
                running = await self._running_answers(key, int(groups[0]["pending"]))
                if running is not None:
                    answers[job] = running.add(answers.get(job))
        listed = self._listed_workers()
        streams += await self._commands(listed)
        used, total = _machine_memory()
        memory = self._checked(memory, "INFO", dict[str, Any]())
        persistence = self._checked(persistence, "INFO", dict[str, Any]())
        complaint = from_info(memory, persistence).complaint()
        services = self._checked(services, "heartbeats", dict[bytes, bytes]())
        health = Health(
            unreadable=self._unreadable,
            lease_seconds=self._session.lease_seconds,
            streams=tuple(streams),
            workers=tuple(self._worker(*each) for each in listed),
            all_workers=len(self.heartbeats),
            silent=sum(map(self._is_silent, self.heartbeats)),
            rankless=sum(
                not heartbeat.rank_pids and not self._is_silent(worker)
                for worker, heartbeat in self.heartbeats.items()
            ),
            running=sum(heartbeat.running for heartbeat in self.heartbeats.values()),
            dead_letters=self._checked(dead_letters, "dead letters", 0),
            newest_dead_letters=await self._dead_letters() if dead_letters else (),
            redis_bytes=memory.get("used_memory", 0),
            waits=(*(() if complaint is None else (complaint,)), *self._waits(services)),
            memory_used=used,
            memory_total=total,
            load=round(os.getloadavg()[0], 2),
        )
        return health, answers

    async def _query(self, queries: Callable[[Any], object]) -> list[Any]:
        """Send all queries in one round trip; a query that fails is answered by its error."""
        async with self._connection.pipeline(transaction=False) as pipe:
            queries(pipe)
            replies: list[Any] = await pipe.execute(raise_on_error=False)
        for reply in replies:
            if isinstance(reply, CONNECTION_ERRORS):
                raise reply
        return replies

    def _checked(self, reply: Any, what: str, default: _Reply) -> _Reply:
        """Return the reply, or the default where it is an error."""
        if isinstance(reply, type(default)):
            return reply
        self._unreadable = f"{what}: {reply}"
        return default

    def _update_heartbeats(self, raw: dict[bytes, bytes]) -> None:
        self.heartbeats = {}
        for name, heartbeat in raw.items():
            try:
                worker = WorkerId(name.decode())
                self.heartbeats[worker] = msgspec.msgpack.decode(heartbeat, type=Heartbeat)
            except ValueError as error:  # msgspec's errors and those of decoding the name
                self._unreadable = f"the heartbeat of {name!r}: {error}"
        now = time.monotonic()
        for worker, heartbeat in self.heartbeats.items():
            newest = heartbeat.incarnation, heartbeat.counter
            if worker not in self._changed or self._changed[worker][0] != newest:
                self._changed[worker] = newest, now

    def _waits(self, services: dict[bytes, bytes]) -> Iterator[str]:
        for name, raw in services.items():
            try:
                beat = msgspec.msgpack.decode(raw, type=ServiceHeartbeat)
            except ValueError as error:
                self._unreadable = f"the heartbeat of {name!r}: {error}"
            else:
                if beat.waiting is not None:
                    yield f"The {name.decode()} waits: {beat.waiting}"

    async def _streams(
        self, name: str, key: str, depth: int, groups: list[dict[str, Any]]
    ) -> list[StreamHealth]:
        if not groups:
            return [StreamHealth(name=name, group=None, depth=depth)]
        replies = await self._query(
            lambda pipe: [
                query
                for group in groups
                for query in (
                    pipe.xpending_range(key, group["name"], min="-", max="+", count=1),
                    pipe.xrange(key, min=f"({group['last-delivered-id'].decode()}", count=1),
                )
            ]
        )
        found: list[StreamHealth] = []
        for group, pending, unread in zip(groups, replies[::2], replies[1::2], strict=True):
            oldest = [row["message_id"] for row in pending] + [id_ for id_, _ in unread]
            found.append(
                StreamHealth(
                    name=name,
                    group=group["name"].decode(),
                    depth=depth,
                    pending=int(group["pending"]),
                    unread=bool(unread),
                    oldest_seconds=_oldest(oldest),
                )
            )
        return found

    async def _commands(self, workers: Sequence[tuple[WorkerId, Heartbeat]]) -> list[StreamHealth]:
        """Return the listed workers' command streams as one: a worker deletes handled commands."""
        keys = [self._keys.commands(worker, beat.incarnation) for worker, beat in workers]
        if not keys:
            return []
        depths = await self._query(lambda pipe: [pipe.xlen(key) for key in keys])
        waiting = [key for key, depth in zip(keys, depths, strict=True) if depth][:_LONGEST]
        oldest: list[Any] = []
        if waiting:
            oldest = await self._query(lambda pipe: [pipe.xrange(key, count=1) for key in waiting])
        ids = [entries[0][0] for entries in oldest if isinstance(entries, list) and entries]
        return [
            StreamHealth(
                name="commands",
                group="each worker",
                depth=sum(depth for depth in depths if isinstance(depth, int)),
                unread=bool(ids),
                oldest_seconds=_oldest(ids),
            )
        ]

    async def _dead_letters(self) -> tuple[DeadLetter, ...]:
        [entries] = await self._query(
            lambda pipe: pipe.xrevrange(self._keys.dead_letters, count=_DEAD_LETTERS)
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

    async def _running_answers(self, key: str, running: int) -> RunningAnswers | None:
        """Read the pending entries; they are in order, so the first have run the longest."""
        [rows] = await self._query(
            lambda pipe: pipe.xpending_range(key, ROLLOUT, min="-", max="+", count=_AGES)
        )
        if not isinstance(rows, list):
            return None
        rows.sort(key=lambda row: -row["time_since_delivered"])
        ages = tuple(row["time_since_delivered"] / 1000 for row in rows)
        rows = rows[:_LONGEST]
        await self._read_prompts(key, [row["message_id"] for row in rows])
        owners = {str(beat.incarnation): worker for worker, beat in self.heartbeats.items()}
        longest = tuple(
            RunningAnswer(
                prompt=prompt.prompt,
                member=prompt.member,
                worker=owners.get(row["consumer"].decode(errors="replace")),
                seconds=row["time_since_delivered"] / 1000,
                attempt=prompt.attempt,
            )
            for row in rows
            if (prompt := self._prompts.get((key, row["message_id"]))) is not None
        )
        return RunningAnswers(longest=longest, ages=ages, running=running)

    async def _read_prompts(self, key: str, ids: list[bytes]) -> None:
        """Read those of the entries that are not known yet, and forget all others of the stream."""
        for other in [each for each in self._prompts if each[0] == key and each[1] not in ids]:
            del self._prompts[other]
        unknown = [id_ for id_ in ids if (key, id_) not in self._prompts]
        if not unknown:
            return
        replies = await self._query(
            lambda pipe: [pipe.xrange(key, min=id_, max=id_) for id_ in unknown]
        )
        for id_, entries in zip(unknown, replies, strict=True):
            try:
                for _, fields in entries:
                    self._prompts[key, id_] = _codec.decode(fields)
            except (StoreError, TypeError) as error:  # TypeError: the reply is an error
                self._unreadable = f"the prompt {id_.decode()}: {error}"

    def _listed_workers(self) -> list[tuple[WorkerId, Heartbeat]]:
        workers = sorted(self.heartbeats.items(), key=lambda each: natural_order(each[0]))
        if len(workers) > _LISTED_WORKERS:
            workers.sort(key=lambda each: (not self._is_silent(each[0]), bool(each[1].rank_pids)))
        return workers[:_LISTED_WORKERS]

    def _silent_seconds(self, worker: WorkerId) -> float:
        return time.monotonic() - self._changed[worker][1]

    def _is_silent(self, worker: WorkerId) -> bool:
        return self._silent_seconds(worker) > self._session.lease_seconds / 2

    def _worker(self, worker: WorkerId, heartbeat: Heartbeat) -> WorkerHealth:
        return WorkerHealth(
            worker=worker,
            incarnation=heartbeat.incarnation,
            ranks=len(heartbeat.rank_pids),
            running=heartbeat.running,
            job=heartbeat.job,
            silent_seconds=round(self._silent_seconds(worker), 1),
            memory_bytes=heartbeat.resident_bytes,
            pid=heartbeat.pid,
        )


def natural_order(worker: WorkerId) -> tuple[int, str]:
    """Return a sort key that puts w2 before w10."""
    return len(worker), worker


def _age(entry: bytes) -> float:
    """Return an entry's age: its id begins with the time at which it was added."""
    return max(0.0, time.time() - int(entry.split(b"-")[0]) / 1000)


def _oldest(entries: Sequence[bytes]) -> float:
    return round(max(map(_age, entries), default=0.0), 1)


def _machine_memory() -> tuple[int, int]:
    """Return used and total memory in bytes, or zeros where they are not known."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        total, free = (int(lines[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return 0, 0
    return total - free, total
