"""Compare the simulator with workers that take as long as GPUs would, by modes and clusters.

`python -m benchmarks.paced --out F.json`

Redis, the coordinator and each worker's intake of prompts are real; decoding and updates take the
seconds of `benchmarks.simulate`, on a clock that runs many times as fast. Lengths are those of
DAPO-Math's shape with 16 workers, and others with 64. The simulator was fitted to none of it.
"""

import argparse
import asyncio
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import structlog
from msgspec.structs import replace

from benchmarks.coordinator_process import CoordinatorSession, coordinator_session, until
from benchmarks.paced_world import PacedWorld
from benchmarks.result import Claim, at_most, write_result
from benchmarks.simulate import dapo_job
from tlt.base.id_types import JobId
from tlt.data.dataset import Prompt
from tlt.protocol.events import AnyEvent, JobPrepared, JobSubmitted
from tlt.protocol.shared_values import Prepared
from tlt.simulation.comparison import simulate
from tlt.simulation.inputs import LengthSpec
from tlt.simulation.job import Job, Mode
from tlt.simulation.product_scheduler import simulated_spec
from tlt.store.message_codec import Codec
from tlt.store.redis_stream import Stream

_JOB = JobId("paced-1")
_MODES = {
    "synchronous": Mode(),
    "speculation": Mode(speculates=True),
    "deferred groups": Mode(speculates=True, defer_long=0.25),
    "resumed answers": Mode(speculates=True, partial=1.0),
    "two batches": Mode(speculates=True, ahead=True),
}
# no prompt is issued twice, with surplus groups and what is put off
_PROMPTS_A_STEP = 3
_events = Codec[AnyEvent](AnyEvent)


class Cluster(NamedTuple):
    workers: int
    lengths: LengthSpec | None
    updates: int
    # simulated seconds in a second
    speed: float


_CLUSTERS = (
    Cluster(16, None, 20, 48.0),
    Cluster(64, LengthSpec(median=1500.0, sigma=1.2, shared=0.3), 8, 8.0),
)


def _job(cluster: Cluster) -> Job:
    job = replace(dapo_job(), workers=cluster.workers, steps=cluster.updates)
    if cluster.lengths is None:
        return job
    return replace(job, inputs=replace(job.inputs, lengths=cluster.lengths))


def measure(job: Job, speed: float) -> float:
    """Return the paced seconds from the first prompt to the last update."""
    spec = simulated_spec(job)
    count = _PROMPTS_A_STEP * spec.algorithm.steps * spec.algorithm.prompts_per_step
    prompts = [Prompt(tokens=(1, 2, 3, 4), answer="7", row={})] * count
    with coordinator_session("paced", prompts) as session:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(session.pids["coordinator"], cores[:1])
        os.sched_setaffinity(0, cores[-1:])
        try:
            return asyncio.run(_measure(job, speed, session, count))
        finally:
            os.sched_setaffinity(0, cores)


async def _measure(job: Job, speed: float, session: CoordinatorSession, prompts: int) -> float:
    world = PacedWorld(job, speed, session.spec.redis_url, session.spec.name, session.run)

    async def is_over() -> bool:
        world.check()
        return world.updates >= job.steps

    try:
        world.start(world.score())
        await world.join(job.workers)
        events = Stream(world.connection, world.keys.events, _events)
        async with world.connection.pipeline(transaction=True) as transaction:
            submitted = JobSubmitted(job=_JOB, spec=simulated_spec(job), folder=str(session.run))
            events.add(transaction, submitted)
            prepared = Prepared(train_prompts=prompts, eval_prompts=0)
            events.add(transaction, JobPrepared(job=_JOB, prepared=prepared))
            await transaction.execute()
        await until(is_over)
    finally:
        await world.end()
    return world.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--updates", type=int)
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 64])
    arguments = parser.parse_args()
    # connections that wait for a command are closed with the world
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    began = time.monotonic()
    clusters = [each for each in _CLUSTERS if each.workers in arguments.workers]
    found: dict[int, list[dict[str, Any]]] = {}
    for cluster in clusters:
        if arguments.updates:
            cluster = cluster._replace(updates=arguments.updates)
        found[cluster.workers] = [_compare(cluster, name) for name in _MODES]
    claims = [claim for workers, modes in found.items() for claim in _claims(workers, modes)]
    details = {f"{workers} workers": modes for workers, modes in found.items()}
    write_result("paced", claims, details, time.monotonic() - began, arguments.out)


def _compare(cluster: Cluster, name: str) -> dict[str, Any]:
    job = replace(_job(cluster), mode=_MODES[name])
    world, trained = simulate(job)
    paced = measure(job, cluster.speed)
    row = {
        "mode": name,
        "updates": job.steps,
        "paced": round(paced, 1),
        "simulated": round(world.now, 1),
        "error": round(world.now / paced - 1, 4),
        "tokens": trained.tokens,
    }
    print(cluster.workers, row, flush=True)
    return row


def _claims(workers: int, modes: Sequence[dict[str, Any]]) -> list[Claim]:
    seconds = {row["mode"]: row["paced"] for row in modes}
    best = min(seconds.values())
    name = f"paced.{workers}"
    return [
        at_most(f"{name}.error", 100 * max(abs(row["error"]) for row in modes), "%", 10.0),
        Claim(
            name=f"{name}.best", value=round(seconds["synchronous"] / best, 3), unit="x", bar=2.5
        ),
        Claim(
            name=f"{name}.over_tlt",
            value=round(seconds["speculation"] / best, 3),
            unit="x",
            bar=1.3,
        ),
    ]


if __name__ == "__main__":
    main()
