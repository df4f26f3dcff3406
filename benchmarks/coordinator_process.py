"""Start Redis and the real coordinator, each in a process of its own, for a job made in advance."""

import asyncio
import multiprocessing
import signal
import tempfile
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tlt.actors.coordinator.coordinator import Coordinator
from tlt.actors.supervisor.ray_actor_classes import run_service
from tlt.base.child_process import die_with_parent
from tlt.data.dataset import Prompt, Prompts, prompts_file
from tlt.spec.config import SessionSpec
from tlt.store.embedded_redis import EmbeddedRedis
from tlt.store.redis_connection import connect
from tlt.store.redis_keys import Keys


class CoordinatorSession(NamedTuple):
    """A session without workers; `pids` names its coordinator's and its Redis's process."""

    spec: SessionSpec
    # folder of the job's run
    run: Path
    redis: EmbeddedRedis
    pids: dict[str, int]


@contextmanager
def coordinator_session(name: str, prompts: Sequence[Prompt]) -> Generator[CoordinatorSession]:
    """Start a session in a folder of its own, with the prompts of a job that is tokenised."""
    with tempfile.TemporaryDirectory(prefix=f"tlt-{name}-") as made:
        folder = Path(made)
        run = folder / "run"
        Prompts.write(prompts_file(run, "train"), prompts)
        redis = EmbeddedRedis(folder / "redis", folder / "socket")
        redis.start()
        spec = SessionSpec(
            name=name,
            folder=str(folder / "session"),
            runs=str(folder / "runs"),
            flight=str(folder / "flight"),
            redis_url=redis.url,
            # a thousand workers in one process may be late
            lease_seconds=60.0,
        )
        coordinator = multiprocessing.get_context("spawn").Process(
            target=_coordinate, args=(spec,), daemon=True
        )
        coordinator.start()
        assert coordinator.pid is not None
        assert redis.pid is not None
        try:
            asyncio.run(_wait_for_coordinator(spec))
            pids = {"coordinator": coordinator.pid, "redis": redis.pid}
            yield CoordinatorSession(spec, run, redis, pids)
        finally:
            coordinator.kill()
            coordinator.join()
            redis.stop()


async def until(true: Callable[[], Awaitable[Any]], every_seconds: float = 0.05) -> None:
    while not await true():  # noqa: ASYNC110
        await asyncio.sleep(every_seconds)


def _coordinate(spec: SessionSpec) -> None:
    """Run a coordinator that prepares no job."""
    die_with_parent(signal.SIGKILL)()
    run_service(lambda: _without_preparation(spec))


def _without_preparation(spec: SessionSpec) -> Coordinator:
    coordinator = Coordinator(spec)
    coordinator.committer.preparations.begin = lambda command, folder: None
    return coordinator


async def _wait_for_coordinator(spec: SessionSpec) -> None:
    """Wait until the coordinator has begun an epoch and read the backlog."""
    connection, keys = connect(spec.redis_url), Keys(spec.name)
    async with connection:
        await until(lambda: connection.hexists(keys.committed, "session"))
