"""Measure the coordinator and Redis with 16, 256 and 1,024 workers, which are simulated.

`python -m benchmarks.scaling --out F.json [--workers 16 256 1024] [--repeats 3]`

A step has 2,048 answers, and at least eight for each worker. The workers and the scorer share one
core, the coordinator has another one, and Redis may use both. First the workers decode at a
moderate pace, which gives latencies: from an event's entry in Redis to that of its command, and
from the event to the simulated worker's reading of the command, which waits for all the others in
its process. Then the coordinator is stopped while they send a whole step's events, and continued:
how fast it then decides and commits them is its throughput, and its CPU time over their number its
cost.
"""

import argparse
import asyncio
import gc
import os
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from redis import Redis

from benchmarks.coordinator_process import coordinator_session, until
from benchmarks.result import Claim, at_most, write_result
from benchmarks.scaling_world import TOKENS, World
from tlt.base.id_types import JobId
from tlt.blobs.answer_files import AnswerFiles
from tlt.data.dataset import Prompt
from tlt.protocol.events import AnyEvent, JobPrepared, JobSubmitted
from tlt.protocol.shared_values import Prepared
from tlt.spec.config import (
    AlgorithmSpec,
    DataSpec,
    DrafterSpec,
    JobSpec,
    PolicySpec,
    RewardSpec,
    RolloutSpec,
    SessionSpec,
    SpeculationSpec,
)
from tlt.store.message_codec import Codec
from tlt.store.redis_keys import COORDINATOR
from tlt.store.redis_stream import Stream

_JOB = JobId("scaling-1")
_LEAST_ANSWERS, _ANSWERS_A_WORKER, _GROUP = 2048, 8, 8
# answers a second while latencies are measured: about 800 events
_PACE = 350.0
_DRAINS = 3
_events = Codec[AnyEvent](AnyEvent)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of one run, with times in milliseconds."""

    workers: int
    # while workers decode at a moderate pace
    events_per_second: float
    in_redis_p50: float
    in_redis_p99: float
    in_redis_samples: int
    to_one_p50: float
    to_one_p99: float
    to_one_samples: int
    to_all_p50: float
    to_all_p99: float
    to_all_samples: int
    # shares of a core
    coordinator_core: float
    redis_core: float
    # of all simulated workers
    workers_core: float
    # while the coordinator decides a step's events that wait for it
    drained_per_second: float
    microseconds_per_event: float


def _answers(workers: int) -> int:
    """Return the answers of a step."""
    return max(_LEAST_ANSWERS, _ANSWERS_A_WORKER * workers)


def _spec(workers: int) -> JobSpec:
    return JobSpec(
        name="scaling",
        policy=PolicySpec(path="policy"),
        data=DataSpec(train="train.jsonl"),
        reward=RewardSpec(kind="final_answer"),
        algorithm=AlgorithmSpec(
            steps=1000,
            prompts_per_step=_answers(workers) // _GROUP,
            group_size=_GROUP,
            checkpoint_every=1,
        ),
        rollout=RolloutSpec(max_new_tokens=TOKENS, slots=_answers(workers) // workers),
        speculation=SpeculationSpec(mode="adaptive"),
        drafter=DrafterSpec(train="always"),
    )


def _cpu_seconds(pid: int) -> float:
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values) or [float("nan")]
    return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Run:
    """One number of workers, in front of a coordinator of its own."""

    def __init__(self, workers: int, session: SessionSpec, run: Path, pids: dict[str, int]) -> None:
        self.workers = workers
        self.session = session
        self.run = run
        self.pids = pids
        self.world = World(session.redis_url, session.name, AnswerFiles(run))
        self.counts = self.world.latencies.counts

    async def measure(self, seconds: float) -> Figures:
        world = self.world
        try:
            world.start(world.score())
            world.pace = self.workers / _PACE
            await self._begin()
            moderate = await self._decode_at_pace(seconds)
            drained = await self._drain()
        finally:
            await world.end()
        return msgspec.convert({"workers": self.workers, **moderate, **drained}, Figures)

    async def _begin(self) -> None:
        world = self.world
        await world.join(self.workers)
        events = Stream(world.connection, world.keys.events, _events)
        async with world.connection.pipeline(transaction=True) as transaction:
            submitted = JobSubmitted(job=_JOB, spec=_spec(self.workers), folder=str(self.run))
            events.add(transaction, submitted)
            prompts = _answers(self.workers) // _GROUP
            prepared = Prepared(train_prompts=prompts, eval_prompts=0)
            events.add(transaction, JobPrepared(job=_JOB, prepared=prepared))
            await transaction.execute()
        await self._until(lambda: self.counts["RolloutFinished"] > 0)

    async def _until(self, true: Callable[[], bool]) -> None:
        async def is_true() -> bool:
            self.world.check()
            return true()

        await until(is_true)

    async def _decode_at_pace(self, seconds: float) -> dict[str, Any]:
        latencies = self.world.latencies
        latencies.clear()
        sent, began = self.counts.total(), time.monotonic()
        pids = {**self.pids, "workers": os.getpid()}
        before = {name: _cpu_seconds(pid) for name, pid in pids.items()}
        await self._until(lambda: time.monotonic() - began >= seconds)
        elapsed = time.monotonic() - began
        used = {name: (_cpu_seconds(pid) - before[name]) / elapsed for name, pid in pids.items()}
        in_redis = latencies.in_redis()
        return {
            "events_per_second": (self.counts.total() - sent) / elapsed,
            "in_redis_p50": _percentile(in_redis, 0.5),
            "in_redis_p99": _percentile(in_redis, 0.99),
            "in_redis_samples": len(in_redis),
            "to_one_p50": _percentile(latencies.to_one, 0.5),
            "to_one_p99": _percentile(latencies.to_one, 0.99),
            "to_one_samples": len(latencies.to_one),
            "to_all_p50": _percentile(latencies.to_all, 0.5),
            "to_all_p99": _percentile(latencies.to_all, 0.99),
            "to_all_samples": len(latencies.to_all),
            "coordinator_core": used["coordinator"],
            "redis_core": used["redis"],
            "workers_core": used["workers"],
        }

    async def _drain(self) -> dict[str, float]:
        self.world.pace = 0.0
        # the first is the rest of a step that had begun
        drains = [await self._drain_step() for _ in range(_DRAINS)][1:]
        return {
            "drained_per_second": statistics.median(rate for rate, _ in drains),
            "microseconds_per_event": statistics.median(cost for _, cost in drains),
        }

    async def _drain_step(self) -> tuple[float, float]:
        """Return the events a second, and the microseconds of CPU time of each."""
        world, pid = self.world, self.pids["coordinator"]
        world.decoding.clear()
        await self._until(self._all_hold)
        sent, finished = self.counts.total(), self.counts["RolloutFinished"] + world.held
        os.kill(pid, signal.SIGSTOP)
        world.decoding.set()
        await self._until(lambda: self.counts["RolloutScored"] == finished)
        world.decoding.clear()
        newest = await self._newest()
        waiting = self.counts.total() - sent
        began, cpu = time.perf_counter(), _cpu_seconds(pid)
        os.kill(pid, signal.SIGCONT)
        ended, cpu_then = await asyncio.to_thread(self._await_decided, newest)
        return waiting / (ended - began), 1e6 * (cpu_then - cpu) / waiting

    def _await_decided(self, newest: tuple[int, int]) -> tuple[float, float]:
        """Return the time and the coordinator's CPU time at which these events are acknowledged.

        A thread notices it at once, while the commands keep the loop of the workers busy.
        """
        key, group = self.world.keys.events, COORDINATOR.encode()
        with Redis.from_url(self.session.redis_url) as connection:
            while True:
                (read,) = [each for each in connection.xinfo_groups(key) if each["name"] == group]
                pending = connection.xpending(key, COORDINATOR)
                if _position(read["last-delivered-id"]) >= newest and (
                    pending["min"] is None or _position(pending["min"]) > newest
                ):
                    return time.perf_counter(), _cpu_seconds(self.pids["coordinator"])
                time.sleep(0.002)

    def _all_hold(self) -> bool:
        held = self.world.held
        return held > 0 and (self.counts["RolloutFinished"] + held) % _answers(self.workers) == 0

    async def _newest(self) -> tuple[int, int]:
        """Return the id of the newest event."""
        ((id_, _),) = await self.world.connection.xrevrange(self.world.keys.events, count=1)
        return _position(id_)


def _position(raw: bytes) -> tuple[int, int]:
    milliseconds, _, sequence = raw.decode().partition("-")
    return int(milliseconds), int(sequence)


def run(workers: int, seconds: float) -> Figures:
    """Measure in a fresh session, whose coordinator has a core of its own."""
    cores = sorted(os.sched_getaffinity(0))
    prompts = [Prompt(tokens=tuple(range(64)), answer="7", row={})] * (_answers(workers) // _GROUP)
    with (
        coordinator_session("scaling", prompts) as (session, folder, _, pids),
        tempfile.TemporaryDirectory(prefix="tlt-scaling-", dir="/dev/shm") as answers,
    ):
        # workers sync answers, which would keep the coordinator's disk busy here
        (folder / "answers").symlink_to(answers)
        os.sched_setaffinity(pids["coordinator"], cores[:1])
        os.sched_setaffinity(0, cores[-1:])
        gc.freeze()
        try:
            return asyncio.run(Run(workers, session, folder, pids).measure(seconds))
        finally:
            os.sched_setaffinity(0, cores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 256, 1024])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="at the moderate pace")
    arguments = parser.parse_args()
    began = time.monotonic()
    found: dict[int, list[Figures]] = defaultdict(list)
    for _ in range(arguments.repeats):
        for workers in arguments.workers:
            found[workers].append(run(workers, arguments.seconds))
            print(found[workers][-1])
    medians = {workers: _medians(runs) for workers, runs in found.items()}
    few, many = medians[min(medians)], medians[max(medians)]
    middle = medians[sorted(medians)[len(medians) // 2]]
    ratio = many["microseconds_per_event"] / few["microseconds_per_event"]
    claims = [
        at_most(
            f"scaling.event_to_command, {middle['workers']} workers, p99",
            middle["in_redis_p99"],
            "ms",
            20,
        ),
        Claim(
            name=f"scaling.events, {middle['workers']} workers",
            value=round(middle["drained_per_second"]),
            unit="/s",
            bar=5000,
        ),
        at_most(
            f"scaling.event_cost, {many['workers']} workers / {few['workers']}", ratio, "", 1.3
        ),
    ]
    details = {"runs": arguments.repeats, "medians": list(medians.values())}
    write_result("scaling", claims, details, time.monotonic() - began, arguments.out)


def _medians(runs: Sequence[Figures]) -> dict[str, float]:
    return {
        name: round(statistics.median(getattr(each, name) for each in runs), 3)
        for name in Figures.__struct_fields__
    }


if __name__ == "__main__":
    main()
