"""Ray's head is started again until all actors beat, with growing pauses while that fails."""

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec

from tlt.actors.backoff import pause_after
from tlt.actors.supervisor.ray_healer import START_SECONDS, RayHealer, missing_actors
from tlt.base.id_types import Incarnation
from tlt.errors import TltError
from tlt.protocol.shared_values import Heartbeat, ServiceHeartbeat
from tlt.session.fault_log import Fault, FaultLog, read_supervised
from tlt.spec.config import SessionSpec
from tlt.store.redis_connection import connect
from tlt.store.redis_keys import Keys


class _Head:
    """A head that ends, and fails to start, when it is told to."""

    def __init__(self) -> None:
        self.end: str | None = None
        self.error: str | None = None
        self.starts = 0

    def ended(self) -> str | None:
        return self.end

    def complaint(self) -> str:
        return "no port"

    def start(self) -> None:
        self.starts += 1
        if self.error is not None:
            raise TltError(self.error)
        self.end = None


def _healer(folder: Path, redis_url: str) -> tuple[RayHealer, _Head, SessionSpec]:
    spec = SessionSpec(
        name=folder.name, folder=str(folder), runs="", flight="", redis_url=redis_url, workers=1
    )
    head: Any = _Head()
    return RayHealer(head, spec, FaultLog(folder)), head, spec


def _beat(spec: SessionSpec) -> None:
    async def send() -> None:
        connection, keys = connect(spec.redis_url), Keys(spec.name)
        service = ServiceHeartbeat(pid=os.getpid(), start_ticks=0, sent_at=0.0)
        worker = Heartbeat(
            incarnation=Incarnation(1),
            counter=1,
            progress=0,
            running=0,
            pid=1,
            rank_pids=(2,),
            job=None,
        )
        for name in ("coordinator", "reward"):
            await connection.hset(keys.services, name, msgspec.msgpack.encode(service))
        await connection.hset(keys.heartbeats, "w0", msgspec.msgpack.encode(worker))
        await connection.aclose()

    asyncio.run(send())


def _faults(folder: Path) -> tuple[Fault, ...]:
    return read_supervised(folder).faults


def test_starts_the_head_again_until_all_actors_beat(tmp_path: Path, redis_url: str) -> None:
    healer, head, spec = _healer(tmp_path, redis_url)
    _beat(spec)
    healer.check(0.0)
    assert (head.starts, _faults(tmp_path)) == (0, ())
    head.end = "Ray's raylet"
    healer.check(1.0)
    assert head.starts == 1
    # the heartbeats of the actors that ended don't count
    assert missing_actors(spec) == ["coordinator", "reward", "w0"]
    healer.check(2.0)
    (fault,) = _faults(tmp_path)
    assert (fault.process, fault.tries, fault.healed_at) == ("Ray's raylet", 1, None)
    _beat(spec)
    healer.check(3.0)
    (fault,) = _faults(tmp_path)
    assert fault.healed_at is not None
    healer.check(4.0)
    assert head.starts == 1


def test_tries_again_later_and_later_while_it_fails(tmp_path: Path, embedded_redis: str) -> None:
    healer, head, _ = _healer(tmp_path, embedded_redis)
    head.end, head.error = "Ray's GCS", "processes do not end"
    starts: list[float] = []
    for tick in range(1000):
        before = head.starts
        healer.check(tick / 10)
        starts += [tick / 10] * (head.starts - before)
    assert starts == [0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 61.0, 91.0]
    (fault,) = _faults(tmp_path)
    assert (fault.tries, fault.error) == (8, "processes do not end")


def test_tries_for_as_long_as_it_fails(tmp_path: Path, embedded_redis: str) -> None:
    healer, head, _ = _healer(tmp_path, embedded_redis)
    head.end, head.error = "Ray's GCS", "the cluster is away"
    for minute in range(100):
        healer.check(60.0 * minute)
    assert _faults(tmp_path)[0].tries == 100


def test_pauses_no_longer_however_often_it_fails() -> None:
    assert [pause_after(failures, 1.0) for failures in (1, 2, 6, 10_000)] == [1.0, 2.0, 30.0, 30.0]


def test_starts_it_once_more_if_an_actor_does_not_come(tmp_path: Path, embedded_redis: str) -> None:
    healer, head, _ = _healer(tmp_path, embedded_redis)
    head.end = "Ray's GCS"
    healer.check(0.0)
    healer.check(START_SECONDS)
    assert head.starts == 1
    healer.check(START_SECONDS + 1)
    (fault,) = _faults(tmp_path)
    assert fault.error == "coordinator, reward, w0 did not come up within 180 s"
    healer.check(START_SECONDS + 3)
    assert head.starts == 2


def test_waits_for_redis_before_it_starts_the_head(tmp_path: Path) -> None:
    healer, head, _ = _healer(tmp_path, f"unix://{tmp_path}/none")
    head.end = "Ray's raylet"
    healer.check(0.0)
    healer.check(1.0)
    assert head.starts == 0
    (fault,) = _faults(tmp_path)
    assert (fault.process, fault.tries) == ("Ray's raylet", 0)
