"""A session in one event loop: real Redis, coordinator, reward scorer and workers, and fake ranks.

Whatever the test ends is ended as its process would be: without a word to the others.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import yaml

from tests.in_process_cli import Outcome, run_command
from tests.local_session.fake_rank import REFUSE_JOBS
from tests.local_session.gates import Gates
from tests.local_session.link import Link
from tests.waiting import wait_until
from tlt.actors.blobs_between_hosts import BlobTransfer
from tlt.actors.coordinator.coordinator import Coordinator
from tlt.actors.reward.reward_scorer import RewardScorer
from tlt.actors.worker.worker import Worker
from tlt.actors.worker.worker_context import WorkerSetup
from tlt.base.id_types import JobId, WorkerId
from tlt.blobs.answer_files import AnswerFiles
from tlt.policies.run.run_state import Phase, RunState
from tlt.protocol.events import RolloutDropped, RolloutFinished
from tlt.protocol.refs import StartingCheckpoint
from tlt.protocol.shared_values import Heartbeat, JobRecord, WorkerInfo
from tlt.report import Snapshot
from tlt.runs.run_folder_reader import journal_entries, open_ledger, read_snapshot
from tlt.session.session_files import LOCK_FILE, write_session
from tlt.spec.config import JobSpec, SessionSpec
from tlt.store.embedded_redis import EmbeddedRedis
from tlt.store.heartbeats import forget_heartbeats, read_heartbeats
from tlt.store.job_requests import ENDED_STATUSES, Jobs
from tlt.store.journal import JournalEntry
from tlt.store.redis_connection import CONNECTION_ERRORS, connect
from tlt.store.redis_keys import Keys

FAKE_RANK = "tests.local_session.fake_rank"
# a bound for a test that hangs, and nothing that a test measures
_PATIENCE_SECONDS = 100.0


class LocalWorker:
    """A worker; a test may end it, start it again, and cut it off from Redis."""

    def __init__(self, spec: SessionSpec, name: WorkerId, folder: Path) -> None:
        self.name = name
        self.link = Link(folder / f"{name}.sock", Path(spec.redis_url.removeprefix("unix://")))
        self._spec = msgspec.structs.replace(spec, redis_url=self.link.url)
        self._worker: Worker | None = None
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        ranks = self._spec.ranks_per_worker
        setup = WorkerSetup(
            session=self._spec,
            worker=self.name,
            host="127.0.0.1",
            devices=["cpu"] * ranks,
            cores=[frozenset()] * ranks,
            blobs=BlobTransfer(self._spec, self.name),
            rank_module=FAKE_RANK,
        )
        self._worker = Worker(setup)
        self.task = asyncio.create_task(self._worker.run())

    async def kill(self) -> None:
        """End it and its ranks."""
        if self.task is not None and self._worker is not None:
            await end_task(self.task)
            await self._worker.connection.aclose()
        self.task = self._worker = None


class LocalSession:
    def __init__(self, folder: Path, redis: EmbeddedRedis, **changes: Any) -> None:
        self.folder = folder
        self.redis = redis
        self.spec = SessionSpec(
            **{
                "name": folder.name,
                "folder": str(folder / "sessions" / folder.name),
                "runs": str(folder / "runs"),
                "flight": str(folder / "flight"),
                "redis_url": redis.url,
                "workers": 2,
                "reward_workers": 2,
                "heartbeat_seconds": 0.1,
                # long enough for a machine that is busy
                "lease_seconds": 30.0,
                **changes,
            }
        )
        self.gates = Gates(Path(self.spec.flight))
        self.connection = connect(redis.url)
        self.jobs = Jobs(self.connection, self.spec)
        self.keys = Keys(self.spec.name)
        names = [WorkerId(f"w{index}") for index in range(self.spec.workers)]
        self.workers = {name: LocalWorker(self.spec, name, folder) for name in names}
        self.coordinator: Coordinator
        self._services: dict[str, asyncio.Task[None]] = {}
        self._scorer: RewardScorer

    # --- its processes

    async def start(self) -> None:
        write_session(self.spec)
        # as its supervisor does, so that commands find the session
        self._lock = open(Path(self.spec.folder) / LOCK_FILE, "ab")  # noqa: SIM115
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.start_coordinator()
        self.start_scorer()
        for worker in self.workers.values():
            await worker.link.start()
            worker.start()

    def start_coordinator(self) -> None:
        self.coordinator = Coordinator(self.spec, BlobTransfer(self.spec, None))
        # a process that plots
        self.coordinator.committer.summaries.start = lambda folder: None
        self._serve("coordinator", self.coordinator.run())

    async def kill_coordinator(self) -> None:
        await end_task(self._services.pop("coordinator"))
        await close_coordinator(self.coordinator)

    def start_scorer(self) -> None:
        self._scorer = RewardScorer(self.spec)
        self._serve("reward", self._scorer.run())

    async def kill_scorer(self) -> None:
        await end_task(self._services.pop("reward"))
        await self._scorer.connection.aclose()

    async def kill_redis(self) -> None:
        """Kill it in the middle of whatever it does; `redis.start` reads its files again."""
        assert self.redis.pid is not None
        os.kill(self.redis.pid, signal.SIGKILL)
        await self.until(lambda: not self.redis.running, "Redis to end")

    async def start_redis(self) -> None:
        self.redis.socket_path.unlink()
        await asyncio.to_thread(self.redis.start)

    async def end(self) -> None:
        """End all at once; a second time nothing is left to do."""
        self._lock.close()
        for worker in self.workers.values():
            await worker.kill()
            await worker.link.close()
        if "reward" in self._services:
            await self.kill_scorer()
        if "coordinator" in self._services:
            await self.kill_coordinator()
        await self.connection.aclose()

    def _serve(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self._services[name] = asyncio.create_task(work)

    async def tlt(self, *arguments: str, code: int = 0) -> Outcome:
        """Run a command on this session, beside its event loop."""
        place = ("--session", self.spec.name)
        outcome = await asyncio.to_thread(run_command, *arguments, *place)
        assert outcome.code == code, (arguments, outcome)
        return outcome

    async def json(self, *arguments: str) -> Any:
        return json.loads((await self.tlt(*arguments, "--json")).stdout)

    def refuse_jobs(self) -> None:
        """Let each rank fail the next jobs, as if their policy couldn't be loaded."""
        Path(self.spec.flight).with_name(REFUSE_JOBS).touch()

    # --- waiting

    async def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for a condition; fail at once if a part of the session has failed."""

        async def holds() -> object:
            ended = [task for task in self._services.values() if task.done()]
            ended += [w.task for w in self.workers.values() if w.task and w.task.done()]
            for task in ended:
                task.result()
                raise AssertionError(f"{task} has ended")
            result = condition()
            return await result if asyncio.iscoroutine(result) else result

        await wait_until(holds, _PATIENCE_SECONDS, f"no {what}")

    async def ended(self, job: JobId) -> JobRecord:
        await self.until(lambda: self.status(job) in ENDED_STATUSES, f"end of {job}")
        return self.record(job)

    async def done(self, job: JobId) -> Snapshot:
        """Wait until a job is done, and return its report."""
        record = await self.ended(job)
        assert (record.status, record.error) == ("done", None)
        return self.fold(job)

    async def reached(self, job: JobId, phase: Phase, step: int = 0) -> None:
        def holds() -> bool:
            state = self.state(job)
            return state is not None and state.phase is phase and state.step >= step

        await self.until(holds, f"{phase} of step {step} of {job}")

    async def arrived(self, gate: str, count: int = 1) -> list[str]:
        """Wait until so many ranks stand at a gate, and return which."""
        await self.until(lambda: len(self.gates.arrived(gate)) >= count, f"{count} at {gate}")
        return sorted(self.gates.arrived(gate))

    async def all_up(self) -> None:
        async def holds() -> bool:
            with contextlib.suppress(*CONNECTION_ERRORS):
                beats = await self.heartbeats()
                known = self.known_workers()
                return len(known) == len(self.workers) and all(
                    worker in beats
                    and beats[worker].incarnation == info.incarnation
                    and beats[worker].rank_pids
                    for worker, info in known.items()
                )
            return False

        await self.until(holds, "all workers")

    async def obeyed(self, worker: WorkerId, but: int = 0) -> None:
        """Wait until a worker has passed on all of its commands, or all but the last ones."""
        info = self.known_workers()[worker]
        key = self.coordinator.effects.keys.commands(worker, info.incarnation)

        async def holds() -> bool:
            return await self.coordinator.effects.connection.xlen(key) == but

        await self.until(holds, f"commands of {worker} that it has read")

    # --- what it says

    async def submit(self, spec: JobSpec, start: StartingCheckpoint | None = None) -> JobId:
        job = (await self.jobs.submit(spec, start)).job
        await self.until(lambda: job in self.coordinator.effects.records, f"record of {job}")
        return job

    def known_workers(self) -> dict[WorkerId, WorkerInfo]:
        """Return the workers that have joined; none while a coordinator begins."""
        if not hasattr(self.coordinator.deciders, "session"):
            return {}
        return self.coordinator.deciders.session.state.workers

    def record(self, job: JobId) -> JobRecord:
        return self.coordinator.effects.records[job]

    def status(self, job: JobId) -> str | None:
        """Return None while a coordinator begins."""
        record = self.coordinator.effects.records.get(job)
        return None if record is None else record.status

    def state(self, job: JobId) -> RunState | None:
        run = self.coordinator.deciders.runs.states.get(job)
        return None if run is None else run.state

    def run(self, job: JobId) -> Path:
        return Path(self.spec.runs) / job

    def answers(self, job: JobId) -> AnswerFiles:
        return AnswerFiles(self.run(job))

    def fold(self, job: JobId) -> Snapshot:
        return read_snapshot(self.run(job))

    def journal(self, job: JobId) -> list[JournalEntry]:
        return list(journal_entries(self.run(job)))

    def events(self, job: JobId, kind: type[Any]) -> list[Any]:
        return [entry.event for entry in self.journal(job) if isinstance(entry.event, kind)]

    async def heartbeats(self) -> dict[WorkerId, Heartbeat]:
        return await read_heartbeats(self.connection, self.keys)

    async def kill_rank(self, worker: str, rank: int, how: int = signal.SIGKILL) -> None:
        beats = await self.heartbeats()
        os.kill(beats[WorkerId(worker)].rank_pids[rank], how)

    async def undisturbed(self, spec: JobSpec) -> list[float]:
        """Return the rewards of a job that nothing disturbs."""
        await self.all_up()
        return rewards(await self.done(await self.submit(spec)))

    async def assert_unharmed(self, job: JobId, expected: list[float]) -> Snapshot:
        """Assert that a job ends as an undisturbed one with these rewards."""
        snapshot = await self.done(job)
        self.assert_nothing_lost_or_doubled(job)
        assert rewards(snapshot) == expected
        return snapshot

    def assert_nothing_lost_or_doubled(self, job: JobId) -> None:
        """Assert that each answer of each step counts once."""
        algorithm, ledger = self.record(job).spec.algorithm, open_ledger(self.run(job))
        journal = self.journal(job)
        changes = [ledger.add(entry.event, entry.at) for entry in journal]
        counted = [
            (change.event.step, change.event.prompt, change.event.member)
            for change in changes
            if isinstance(change.event, RolloutFinished)
            and change.event.purpose == "train"
            and change.counts
        ]
        each = algorithm.prompts_per_step * algorithm.group_size
        first = journal_start(self.fold(job))
        dropped = [entry.event for entry in journal if isinstance(entry.event, RolloutDropped)]
        assert dropped == []
        assert len(counted) == len(set(counted))
        assert len(counted) == (algorithm.steps - first) * each


def changed(spec: JobSpec, **sections: Mapping[str, object]) -> JobSpec:
    """Return a spec with other values of some sections' keys."""
    parts = {
        name: msgspec.structs.replace(getattr(spec, name), **values)
        for name, values in sections.items()
    }
    return msgspec.structs.replace(spec, **parts)


def write_spec(session: LocalSession, spec: JobSpec) -> str:
    """Write a spec for a command that reads one, and return the file."""
    path = session.folder / "job.yaml"
    path.write_text(yaml.safe_dump(msgspec.to_builtins(spec)))
    return str(path)


def journal_start(snapshot: Snapshot) -> int:
    """Return the first step of a job, which isn't 0 if it started from a checkpoint."""
    return snapshot.steps[0].step


def rewards(snapshot: Snapshot) -> list[float]:
    return [step.reward for step in snapshot.steps]


async def end_task(task: asyncio.Task[None]) -> None:
    """Cancel a service until it is done: a time-out of Redis' client can swallow a cancellation."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=2.0)


async def close_coordinator(coordinator: Coordinator) -> None:
    """Close what a coordinator's process would leave to the kernel."""
    await coordinator.effects.connection.aclose()
    deciders = coordinator.deciders
    # a short test may end before the session's state is there
    session = [deciders.session] if "session" in vars(deciders) else []
    for opened in (*session, *deciders.runs.states.values()):
        opened.close()
    for job in deciders.runs.states:
        coordinator.effects.close_run(job)
    if coordinator.lock is not None:
        coordinator.lock.close()


@asynccontextmanager
async def local_session(
    folder: Path, redis: EmbeddedRedis, *, new: bool = True, **changes: Any
) -> AsyncIterator[LocalSession]:
    """Start a session, or one that was ended in this folder, and end it unless the test has."""
    session = LocalSession(folder, redis, **changes)
    try:
        if not new:
            await forget_heartbeats(session.connection, session.keys)  # as the supervisor does
        await session.start()
        yield session
    finally:
        await session.end()
