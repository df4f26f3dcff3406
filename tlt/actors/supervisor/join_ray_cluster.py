"""Join a Ray cluster that somebody else runs, and look at its hosts before a session uses them.

`tlt.session.cluster_plan` runs this module with `-m`, and writes a request to its standard input.
"""

import asyncio
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tlt.base.end_session_processes import mark
from tlt.blobs.blob_url_store import BlobStore
from tlt.errors import ConfigError, TltError
from tlt.protocol.refs import SCHEMA_VERSION
from tlt.session.cluster_plan import ClusterAnswer, ClusterRequest, RayNode, plan_workers
from tlt.store.redis_connection import check, connect

_CHECK_SECONDS = 120.0
_REDIS_SECONDS = 10.0
_PROBE_SECONDS = 5.0
_ASK_WITHOUT_TOKEN = """
import sys
from ray._raylet import GcsClient
try:
    GcsClient(address=sys.argv[1]).get_all_node_info()
    print("answered")
except Exception as error:
    print(type(error).__name__)
"""
_UNKNOWN = "whether it takes calls without a token can't be told"
_RAY_ERRORS = (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError, OSError)


def join(address: str, runtime_env: str, folder: Path, namespace: str | None = None) -> None:
    """Connect this process to a cluster; all that it starts there carries the session's mark."""
    _probe(address)
    environment = msgspec.json.decode(runtime_env, type=dict[str, Any])
    variables = environment.get("env_vars", {})
    # Ray's processes would write their titles over their environment, and so over the mark.
    ours = {**mark(folder), "SPT_NOENV": "1"}
    ray.init(
        address=address,
        namespace=namespace,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={**environment, "env_vars": {**variables, **ours}},
    )


def _probe(address: str) -> None:
    """Raise ConnectionError if nobody listens: Ray would wait for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return  # `auto`
    try:
        socket.create_connection((host, int(port)), _PROBE_SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"no Ray answers at {address}: {error}") from error


@ray.remote(num_cpus=0)
def complain_of_host(request: bytes, schema: int, python: str) -> str | None:
    """Say what the host lacks on which this runs."""
    asked = msgspec.json.decode(request, type=ClusterRequest)
    if schema != SCHEMA_VERSION:
        return f"its TLT writes messages of schema {SCHEMA_VERSION}, this one of {schema}"
    if python != _python():
        return f"it has Python {_python()}, and this host {python}"
    if not Path(asked.probe).exists():
        return f"it doesn't see {Path(asked.probe).parent}, as all hosts must (--runs)"
    try:
        Path(asked.folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return f"{asked.folder}: {error.strerror}"
    try:
        if asked.blobs is not None:
            store = BlobStore(asked.blobs)
            store.find(asked.blobs_probe)
            store.check()
        asyncio.run(_check_redis(asked.redis_url))
    except TltError as error:
        return str(error)
    return None


def _refuse_without_token(gcs: str) -> None:
    """Raise ConfigError if the cluster answers a process that has no token."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _ASK_WITHOUT_TOKEN, gcs],
            # a token may also lie in the home folder
            env={**plain, "HOME": os.devnull},
            capture_output=True,
            text=True,
            timeout=_CHECK_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{_UNKNOWN}: no reply in {_CHECK_SECONDS:.0f} s") from error
    *_, said = ["", *asked.stdout.split()]
    if said == "answered":
        raise ConfigError("it takes calls without a token: start Ray with RAY_AUTH_MODE=token")
    if said != "AuthenticationError":
        raise ConfigError(f"{_UNKNOWN}: {said or asked.stderr.strip()[-200:]}")


async def _check_redis(url: str) -> None:
    connection = connect(url, _REDIS_SECONDS)
    try:
        await check(connection, url)
    finally:
        await connection.aclose()


def _answer(request: ClusterRequest) -> ClusterAnswer:
    join(request.address, request.runtime_env, Path(request.folder))
    _refuse_without_token(ray.get_runtime_context().gcs_address)
    nodes = {
        str(node["NodeID"]): RayNode(
            address=str(node["NodeManagerAddress"]),
            cpus=int(node["Resources"].get("CPU", 0)),
            gpus=int(node["Resources"].get("GPU", 0)),
        )
        for node in ray.nodes()
        if node["Alive"]
    }
    cluster = plan_workers(list(nodes.values()), request)
    check: Any = complain_of_host
    asked = msgspec.json.encode(request)
    answers = {
        node.address: check.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
        ).remote(asked, SCHEMA_VERSION, _python())
        for node_id, node in nodes.items()
    }
    for address, answer in answers.items():
        try:
            complaint: Any = ray.get(answer, timeout=_CHECK_SECONDS)
        except _RAY_ERRORS as error:
            complaint = _last_line(error)
        if complaint is not None:
            raise ConfigError(f"host {address}: {complaint}")
    return ClusterAnswer(cluster=cluster)


def _last_line(error: Exception) -> str:
    """Shorten an error of Ray, which holds a traceback."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _python() -> str:
    return ".".join(map(str, sys.version_info[:2]))


def main() -> None:
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=ClusterRequest)
    try:
        answer = _answer(request)
    except TltError as error:
        answer = ClusterAnswer(complaint=str(error))
    except _RAY_ERRORS as error:
        answer = ClusterAnswer(complaint=_last_line(error))
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(answer))


if __name__ == "__main__":
    main()
