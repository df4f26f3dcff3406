"""The services as Ray actors. Each runs its own event loop in a thread that lives as long as it.

Ray runs `__init__` again when it restarts an actor, and nothing else: so the loop starts there.
All state is in Redis and the run's folder. A service that fails ends its process.
"""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import ray
import structlog

from tlt.actors.coordinator import Coordinator
from tlt.actors.reward_scorer import Reward
from tlt.actors.worker import Worker
from tlt.actors.worker_setup import WorkerSetup
from tlt.config import SessionSpec
from tlt.ids import WorkerId
from tlt.json_logs import write_logs_to


def _decode(session: bytes) -> SessionSpec:
    return msgspec.msgpack.decode(session, type=SessionSpec)


def _serve(session: SessionSpec, name: str, service: Callable[[], Awaitable[None]]) -> None:
    write_logs_to(Path(session.folder) / "logs", name)

    async def run() -> None:
        await service()

    def thread() -> None:
        log = structlog.get_logger(name)
        log.info("started", pid=os.getpid())
        try:
            asyncio.run(run())
        except BaseException:
            log.exception("ended")
        os._exit(1)

    threading.Thread(target=thread, name=name, daemon=True).start()


@ray.remote(num_cpus=0, max_restarts=-1)
class CoordinatorActor:
    def __init__(self, session: bytes) -> None:
        spec = _decode(session)
        _serve(spec, "coordinator", lambda: Coordinator(spec).run())

    def pid(self) -> int:
        return os.getpid()


@ray.remote(num_cpus=0, max_restarts=-1)
class RewardActor:
    def __init__(self, session: bytes) -> None:
        spec = _decode(session)
        _serve(spec, "reward", lambda: Reward(spec).run())

    def pid(self) -> int:
        return os.getpid()


@ray.remote(max_restarts=-1)
class WorkerActor:
    def __init__(self, session: bytes, name: str, host: str, cores: list[list[int]]) -> None:
        spec = _decode(session)
        devices = [f"cuda:{i}" if spec.device == "cuda" else "cpu" for i in range(len(cores))]

        async def run() -> None:
            setup = WorkerSetup(
                session=spec,
                worker=WorkerId(name),
                host=host,
                devices=devices,
                cores=[frozenset(rank) for rank in cores],
            )
            await Worker(setup).run()

        _serve(spec, name, run)

    def pid(self) -> int:
        return os.getpid()
