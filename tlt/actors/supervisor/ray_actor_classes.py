"""Run the services as Ray actors, each with an event loop in its own thread.

A restarted actor runs `__init__` and nothing else, so the thread starts there. All state is in
Redis and the run's folder. A service that fails ends its process.
"""

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import ray
import structlog

from tlt.actors.blobs_between_hosts import (
    BlobTransfer,
    blob_file,
    read_part,
    release_blob,
    remove_job_folder,
)
from tlt.actors.coordinator.coordinator import Coordinator
from tlt.actors.reward.reward_scorer import RewardScorer
from tlt.actors.worker.host_cores_and_folders import WorkerHost
from tlt.actors.worker.worker import Worker
from tlt.actors.worker.worker_context import WorkerSetup
from tlt.base.id_types import Digest, JobId, WorkerId
from tlt.base.json_logs import write_logs_to
from tlt.spec.config import SessionSpec


class Service(Protocol):
    def run(self) -> Coroutine[Any, Any, None]: ...


def run_service(make: Callable[[], Service]) -> None:
    """Make a service and run it to its end.

    What was imported is collected no more: with it a full collection takes 0.2 s.
    """
    gc.collect()
    gc.freeze()

    async def run() -> None:
        await make().run()

    asyncio.run(run())


_RAYLET_SECONDS = 0.5


def _serve(session: SessionSpec, name: str, make: Callable[[], Service]) -> None:
    write_logs_to(Path(session.folder) / "logs", name)

    def thread() -> None:
        log = structlog.get_logger(name)
        try:
            log.info("started", pid=os.getpid())
            run_service(make)
        except BaseException:
            log.exception("ended")
        finally:  # whatever the log does, Ray has to start another process
            os._exit(1)

    threading.Thread(target=thread, name=name, daemon=True).start()
    threading.Thread(target=_end_with_raylet, name="raylet", daemon=True).start()


def _end_with_raylet() -> None:
    """End the process soon after its parent: Ray itself takes up to a minute."""
    raylet = os.getppid()
    while os.getppid() == raylet:
        time.sleep(_RAYLET_SECONDS)
    os._exit(1)


def _decode(session: bytes) -> SessionSpec:
    return msgspec.msgpack.decode(session, type=SessionSpec)


@ray.remote(num_cpus=0, max_restarts=-1)
class CoordinatorActor:
    def __init__(self, session: bytes) -> None:
        spec = _decode(session)
        _serve(spec, "coordinator", lambda: Coordinator(spec, BlobTransfer(spec, None)))


@ray.remote(num_cpus=0, max_restarts=-1)
class RewardActor:
    def __init__(self, session: bytes) -> None:
        spec = _decode(session)
        _serve(spec, "reward", lambda: RewardScorer(spec))


@ray.remote(max_restarts=-1)
class WorkerActor:
    def __init__(
        self, session: bytes, name: str, host: str = "", cores: list[list[int]] | None = None
    ) -> None:
        """Take `host` and `cores`, or find them out: in a cluster it isn't known in advance."""
        spec = _decode(session)
        self._spec = spec
        self._host = None if spec.cluster is None else WorkerHost(spec, spec.cluster)
        if self._host is not None:
            host, cores = self._host.address, self._host.cores
        assert cores is not None
        devices = [f"cuda:{i}" if spec.device == "cuda" else "cpu" for i in range(len(cores))]
        setup = WorkerSetup(
            session=spec,
            worker=WorkerId(name),
            host=host,
            devices=devices,
            cores=[frozenset(rank) for rank in cores],
            blobs=BlobTransfer(spec, WorkerId(name)),
        )
        _serve(spec, name, lambda: Worker(setup))

    def has_blob(self, job: str, digest: str) -> bool:
        """Return True if this host has a blob of the job in flight."""
        return blob_file(self._spec, JobId(job), Digest(digest)).exists()

    def read_blob(self, job: str, digest: str, offset: int, size: int) -> bytes:
        """Return a part of a blob; it travels through Ray's object store."""
        return read_part(blob_file(self._spec, JobId(job), Digest(digest)), offset, size)

    def release_blobs(self, job: str, digests: Sequence[str]) -> None:
        """Delete blobs in flight on this host."""
        for digest in digests:
            release_blob(self._spec, JobId(job), Digest(digest))

    def remove_job_folder(self, job: str, only_states: bool) -> None:
        """Remove what a job has in shared memory on this host; its ranks may be gone."""
        remove_job_folder(self._spec, JobId(job), only_states=only_states)

    def end_ranks(self) -> None:
        """Kill the ranks, because the session ends."""
        if self._host is not None:
            self._host.end_ranks()

    def remove_files(self) -> None:
        """Remove the session's files of this host, because the session ends."""
        if self._host is not None:
            self._host.remove_files()
