"""Start Ray and the session's actors, and stay: Ray's daemons end with this process.

Run as `python -m tlt.actors.ray_head_main FOLDER TEMPORARY`, by `tlt.actors.ray_head`.
"""

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import ray

from tlt.actors.ray_actors import CoordinatorActor, RewardActor, WorkerActor
from tlt.config import SessionSpec
from tlt.session_files import load_session

# A session runs on one host, and its parts find each other at this address.
_HOST = "127.0.0.1"


def start_ray(spec: SessionSpec, temporary: Path) -> None:
    ray.init(
        address="local",
        _node_ip_address=_HOST,
        num_cpus=spec.workers * spec.ranks_per_worker,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=str(temporary),
        object_store_memory=80 * 1024 * 1024,
    )


def start_actors(spec: SessionSpec) -> list[Any]:
    """Return the handles, without which Ray would end the actors."""
    coordinator: Any = CoordinatorActor
    reward: Any = RewardActor
    worker: Any = WorkerActor
    session = msgspec.msgpack.encode(spec)
    actors = [coordinator.remote(session), reward.remote(session)]
    per_worker = spec.ranks_per_worker
    on_gpu = spec.device == "cuda"
    for index, cores in enumerate(pinned_cores(spec.workers, per_worker)):
        options = {"num_cpus": per_worker, "num_gpus": per_worker if on_gpu else 0}
        actors.append(worker.options(**options).remote(session, f"w{index}", _HOST, cores))
    return actors


def pinned_cores(workers: int, ranks: int) -> list[list[list[int]]]:
    """Return the cores of each worker's ranks, or no cores if there are fewer than ranks."""
    available = sorted(os.sched_getaffinity(0))
    each = len(available) // (workers * ranks)
    return [
        [
            available[(worker * ranks + rank) * each : (worker * ranks + rank + 1) * each]
            for rank in range(ranks)
        ]
        for worker in range(workers)
    ]


def main() -> None:
    spec = load_session(Path(sys.argv[1]))
    start_ray(spec, Path(sys.argv[2]))
    actors = start_actors(spec)
    while actors:
        signal.pause()


if __name__ == "__main__":
    main()
