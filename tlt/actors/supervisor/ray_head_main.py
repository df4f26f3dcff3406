"""Start Ray, or join a cluster, and start the session's actors; they end with this process.

`ray_head` runs this module with `-m` and two arguments: FOLDER TEMPORARY.
"""

import logging
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from tlt.actors.supervisor.join_ray_cluster import join
from tlt.actors.supervisor.ray_actor_classes import CoordinatorActor, RewardActor, WorkerActor
from tlt.actors.worker.host_cores_and_folders import pinned_cores
from tlt.session.session_files import load_session
from tlt.spec.config import RayCluster, SessionSpec

# Without a cluster, a session runs on one host, and its parts find each other at this address.
_HOST = "127.0.0.1"
_LEAVE_SECONDS = 8.0
_READERS = 8


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
    """Start the actors on this host; return the handles, without which Ray would end them."""
    coordinator: Any = CoordinatorActor
    reward: Any = RewardActor
    worker: Any = WorkerActor
    session = msgspec.msgpack.encode(spec)
    actors = [coordinator.remote(session), reward.remote(session)]
    per_worker = spec.ranks_per_worker
    for index, cores in enumerate(pinned_cores(spec.workers, per_worker)):
        options = {"num_cpus": per_worker, "num_gpus": _gpus(spec)}
        actors.append(worker.options(**options).remote(session, f"w{index}", _HOST, cores))
    return actors


def start_actors_in_cluster(spec: SessionSpec, cluster: RayCluster) -> Iterator[Any]:
    """Start workers on all hosts of the plan, and the other actors on this host.

    Each host has a placement group of its own: where a host is lost, the other groups stay, and
    this one waits for a host that has room for it.
    """
    coordinator: Any = CoordinatorActor
    reward: Any = RewardActor
    worker: Any = WorkerActor
    session = msgspec.msgpack.encode(spec)
    own_host = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    # the cluster's daemons start them, and know nothing of the session's folders
    scratch = {"env_vars": {"TMPDIR": tempfile.gettempdir()}}
    here = {"scheduling_strategy": own_host, "runtime_env": scratch}
    yield coordinator.options(**here).remote(session)
    yield reward.options(**here).remote(session)
    bundle: dict[str, float] = {"CPU": cluster.cpus_per_worker}
    if gpus := _gpus(spec):
        bundle["GPU"] = gpus
    for host in range(cluster.hosts):
        group = placement_group([bundle] * cluster.workers_per_host, strategy="STRICT_PACK")
        for slot in range(cluster.workers_per_host):
            place = PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=slot
            )
            name = f"w{host * cluster.workers_per_host + slot}"
            options = {
                "name": name,
                "num_cpus": cluster.cpus_per_worker,
                # other hosts read this one's blobs, several at once
                "max_concurrency": _READERS,
                "num_gpus": _gpus(spec),
                "scheduling_strategy": place,
            }
            yield worker.options(**options).remote(session, name)


def leave_cluster(actors: Sequence[Any]) -> None:
    """End the workers, and remove what they have on their hosts; some may not be reached."""
    workers = actors[2:]
    for step in ("end_ranks", "remove_files"):
        calls = [getattr(worker, step).remote() for worker in workers]
        ray.wait(calls, num_returns=len(calls), timeout=_LEAVE_SECONDS / 2)
    for actor in actors:
        ray.kill(actor)


def _gpus(spec: SessionSpec) -> int:
    return spec.ranks_per_worker if spec.device == "cuda" else 0


def main() -> None:
    folder = Path(sys.argv[1])
    spec = load_session(folder)
    if spec.cluster is None:
        start_ray(spec, Path(sys.argv[2]))
        actors = start_actors(spec)
        while actors:
            signal.pause()
    else:
        join(spec.cluster.address, spec.cluster.runtime_env, folder, namespace=str(folder))
        actors: list[Any] = []
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        try:
            for actor in start_actors_in_cluster(spec, spec.cluster):
                actors.append(actor)
            while True:
                signal.pause()
        finally:
            leave_cluster(actors)


if __name__ == "__main__":
    main()
