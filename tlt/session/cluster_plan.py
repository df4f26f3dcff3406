"""Plan a session on a Ray cluster that it joins: its hosts, and how many workers on each."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from tlt.base.child_process import last_line
from tlt.blobs.blob_url_store import BlobStore
from tlt.errors import ConfigError
from tlt.spec.config import RayCluster

_ASK_SECONDS = 240.0


class ClusterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Describe the cluster as `tlt up` was told to."""

    address: str
    workers_per_host: int | None = None
    # a file in JSON or YAML
    runtime_env: Path | None = None


class ClusterRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A session that wants to join a cluster."""

    address: str
    workers_per_host: int | None
    # JSON
    runtime_env: str
    ranks: int
    device: Literal["cpu", "cuda"]
    redis_url: str
    folder: str
    # a file that all hosts have to see
    probe: str
    # the URL of committed blobs, and an object that all hosts have to see there
    blobs: str | None = None
    blobs_probe: str = ""


class ClusterAnswer(msgspec.Struct, frozen=True, kw_only=True):
    cluster: RayCluster | None = None
    complaint: str | None = None


class RayNode(msgspec.Struct, frozen=True, kw_only=True):
    """A host of the cluster, and its devices."""

    address: str
    cpus: int
    gpus: int


def ask_cluster(
    options: ClusterOptions,
    *,
    ranks: int,
    device: Literal["cpu", "cuda"],
    redis_url: str,
    folder: Path,
    runs: Path,
    store: BlobStore | None = None,
) -> RayCluster:
    """Check all hosts, and choose the workers on each; raise ConfigError with what one lacks.

    A process of its own does it, because Ray's client ends the process that loses its cluster.
    """
    if os.environ.get("RAY_AUTH_MODE") != "token":
        raise ConfigError(
            f"--ray {options.address}: TLT joins clusters with token authentication only: set "
            "RAY_AUTH_MODE=token here and where Ray is started"
        )
    with (
        tempfile.NamedTemporaryFile(dir=runs, prefix=".tlt-up-") as probe,
        nullcontext("") if store is None else store.probe() as blobs_probe,
    ):
        request = ClusterRequest(
            address=options.address,
            workers_per_host=options.workers_per_host,
            runtime_env=_read_runtime_env(options.runtime_env),
            ranks=ranks,
            device=device,
            redis_url=redis_url,
            folder=str(folder),
            probe=probe.name,
            blobs=None if store is None else store.url,
            blobs_probe=blobs_probe,
        )
        try:
            done = subprocess.run(
                [sys.executable, "-m", "tlt.actors.supervisor.join_ray_cluster"],
                input=msgspec.json.encode(request),
                capture_output=True,
                timeout=_ASK_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"--ray {options.address}: no answer within {_ASK_SECONDS:.0f} s"
            ) from error
    try:
        answer = msgspec.json.decode(done.stdout.rpartition(b"\n")[2], type=ClusterAnswer)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--ray {options.address}: {last_line(done.stderr)}") from error
    if answer.cluster is None:
        raise ConfigError(f"--ray {options.address}: {answer.complaint}")
    return answer.cluster


def plan_workers(nodes: Sequence[RayNode], request: ClusterRequest) -> RayCluster:
    """Use every host that has a device for each rank; by default, all of their devices.

    All hosts get the same number of workers: that of the host with the fewest devices.
    """
    on_gpus = request.device == "cuda"
    needed = (request.workers_per_host or 1) * request.ranks
    devices = {node.address: node.gpus if on_gpus else node.cpus for node in nodes}
    used = [node for node in nodes if devices[node.address] >= needed]
    if not used:
        seen = ", ".join(f"{address} has {count}" for address, count in devices.items())
        raise ConfigError(f"no host has {needed} {'GPUs' if on_gpus else 'CPUs'} ({seen})")
    fewest = min(devices[node.address] for node in used)
    each = request.workers_per_host or fewest // request.ranks
    return RayCluster(
        address=request.address,
        hosts=len(used),
        workers_per_host=each,
        cpus_per_worker=max(1, min(node.cpus for node in used) // each),
        runtime_env=request.runtime_env,
    )


def _read_runtime_env(file: Path | None) -> str:
    if file is None:
        return "{}"
    try:
        read: Any = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--runtime-env {file}: {error}") from error
    if not isinstance(read, dict):
        raise ConfigError(f"--runtime-env {file}: it has to be a mapping")
    return msgspec.json.encode(read).decode()
