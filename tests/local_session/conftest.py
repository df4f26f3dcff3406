"""Fixtures: a Redis for all tests, a session of two workers with two ranks each, and a job."""

import gc
import json
import tempfile
import warnings
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import pytest
import structlog

from tests.local_session.quick_parts import InlineRewards, ThreadPreparer
from tests.local_session.session import LocalSession, local_session
from tlt.actors.coordinator import preparation_process
from tlt.actors.reward import reward_scorer
from tlt.preparation import prepare_job
from tlt.spec.config import JobSpec, PolicySpec, RolloutSpec, SpeculationSpec
from tlt.spec.data_and_algorithm import AlgorithmSpec, DataSpec
from tlt.spec.reward import RewardSpec
from tlt.store.embedded_redis import EmbeddedRedis

POLICY = Path(__file__).parents[2] / "examples" / "tiny_reasoner" / "model"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to the kernel what a service that is cancelled leaves to it when its process ends."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            left = "ignore::pytest.PytestUnraisableExceptionWarning"
            item.add_marker(pytest.mark.filterwarnings(left))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown() -> Generator[None]:
    """Free it once the event loop, which holds some of it, is closed; no later test finds it."""
    try:
        return (yield)
    finally:
        with warnings.catch_warnings(action="ignore"):
            gc.collect()


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[EmbeddedRedis]:
    with tempfile.TemporaryDirectory(prefix="tlt-", dir="/tmp") as folder:
        server = EmbeddedRedis(Path(folder) / "data", Path(folder) / "redis.sock")
        server.start()
        yield server
        server.stop()


@pytest.fixture
def own_redis(short_folder: Path) -> Iterator[EmbeddedRedis]:
    """Start a server that a test may kill."""
    server = EmbeddedRedis(short_folder / "data", short_folder / "redis.sock")
    server.start()
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def _without_processes_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation_process, "Preparer", ThreadPreparer)
    for module in (prepare_job, reward_scorer):
        monkeypatch.setattr(module, "WeightedRewards", InlineRewards)


@pytest.fixture(autouse=True)
def _logs_in_a_file(short_folder: Path) -> Iterator[None]:
    """Keep logs apart from what a command prints in this process."""
    with open(short_folder / "log", "a", buffering=1) as file:
        structlog.configure(logger_factory=structlog.WriteLoggerFactory(file=file))
        yield
        structlog.reset_defaults()


@pytest.fixture(autouse=True)
def _home(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLT_HOME", str(short_folder))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
async def session(short_folder: Path, shared_redis: EmbeddedRedis) -> AsyncIterator[LocalSession]:
    async with local_session(short_folder, shared_redis, ranks_per_worker=2) as session:
        yield session


@pytest.fixture
async def alone(short_folder: Path, shared_redis: EmbeddedRedis) -> AsyncIterator[LocalSession]:
    """Start a session with one worker of one rank, which must repeat lost work itself."""
    async with local_session(short_folder, shared_redis, workers=1) as session:
        yield session


@pytest.fixture
def spec(short_folder: Path) -> JobSpec:
    """Return a job of two steps whose answers are right as often as wrong."""
    data = short_folder / "data.jsonl"
    rows = [{"prompt": f"{i:02d}+01=", "answer": str(i % 2)} for i in range(24)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return JobSpec(
        name="small",
        policy=PolicySpec(path=str(POLICY)),
        data=DataSpec(train=str(data), eval=str(data), eval_limit=6),
        reward=RewardSpec(kind="regex", pattern=r"(\d)\D*$"),
        algorithm=AlgorithmSpec(
            steps=2,
            prompts_per_step=4,
            group_size=4,
            minibatches=2,
            checkpoint_every=2,
            # longer than any test waits: ranks that wait in vain are to be replaced before
            collective_timeout_seconds=600.0,
        ),
        rollout=RolloutSpec(max_new_tokens=48, slots=2),
        speculation=SpeculationSpec(mode="off"),
        seed=3,
    )
