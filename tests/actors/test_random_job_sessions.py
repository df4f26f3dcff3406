"""Whatever comes, a worker serves one job at most, its run knows it, and all jobs end."""

from pathlib import Path
from random import Random

import msgspec
import pytest
from msgspec import UNSET

from tests.actors.test_jobs_at_once import decide, heartbeat, joined, lost, prepared, submitted
from tests.actors.test_startup_event_backlog import Session, end
from tlt.actors.coordinator.coordinator import Coordinator
from tlt.base.id_types import Incarnation, JobId, WorkerId
from tlt.policies.run.run_state import Phase
from tlt.policies.session.workers_of_jobs import owner_of
from tlt.protocol.commands import PauseJob, ResumeJob
from tlt.protocol.events import AnyEvent, WorkerFailed
from tlt.store.job_requests import ENDED_STATUSES

_WORKERS = tuple(WorkerId(f"w{number}") for number in range(3))
_MOST_JOBS = 6
_MOVES = 60


class Sessions:
    """A session, its coordinators one after the other, and what happens to jobs and workers."""

    def __init__(self, folder: Path, redis_url: str, chooser: Random) -> None:
        self.folder = folder
        self.files = Session(folder, redis_url)
        self.chooser = chooser
        self.coordinator: Coordinator
        self.jobs: list[JobId] = []
        self.living: dict[WorkerId, int] = {}
        self.numbers = 0

    async def start(self) -> None:
        self.coordinator = self.files.coordinator()
        self.coordinator.committer.summaries.start = lambda folder: None
        connection, keys = self.coordinator.effects.connection, self.coordinator.effects.keys
        await connection.delete(keys.heartbeats)
        for worker, incarnation in self.living.items():
            await connection.hset(keys.heartbeats, worker, heartbeat(incarnation))
        await self.coordinator.recover()

    async def restart(self) -> None:
        await end(self.coordinator)
        await self.start()

    async def decide(self, event: AnyEvent) -> None:
        await decide(self.coordinator, event)
        await self.let_leave()
        self.check()

    async def let_leave(self) -> None:
        """Give paused runs' workers fresh ranks, as they were commanded to."""
        for run in list(self.coordinator.deciders.running().values()):
            if run.state.phase is Phase.PAUSED:
                for worker, known in list(run.state.workers.items()):
                    del self.living[worker]
                    await decide(
                        self.coordinator, lost(worker, known.info.incarnation, returning=True)
                    )

    def check(self) -> None:
        session = self.coordinator.deciders.session.state
        assert {w: each.incarnation for w, each in session.workers.items()} == self.living
        known: list[WorkerId] = []
        for job, run in self.coordinator.deciders.running().items():
            own = {w: i for w, i in self.living.items() if owner_of(session, w) == job}
            served = {w: each.info.incarnation for w, each in run.state.workers.items()}
            assert served == ({} if run.state.phase is Phase.PAUSED else own)
            known += served
        assert len(known) == len(set(known))

    async def join(self, worker: WorkerId) -> None:
        self.numbers += 1
        self.living[worker] = self.numbers
        await self.decide(joined(worker, self.numbers))

    async def move(self) -> None:
        chooser, session = self.chooser, self.coordinator.deciders.session.state
        jobs, worker = list(session.jobs), chooser.choice(_WORKERS)
        kinds = ("submit", "work", "prepare", "prepare", "fail", "pause", "go on", "restart")
        match chooser.choice(kinds):
            case "submit" if len(self.jobs) < _MOST_JOBS:
                await self.submit()
            case "work" if worker not in self.living:
                await self.join(worker)
            case "work":
                returning = chooser.random() < 0.5
                await self.decide(lost(worker, self.living.pop(worker), returning=returning))
            case "prepare":
                await self.prepare()
            case "fail":
                await self.fail(worker)
            case "pause" if jobs:
                await self.decide(PauseJob(job=chooser.choice(jobs)))
            case "go on" if jobs:
                await self.decide(ResumeJob(job=chooser.choice(jobs)))
            case "restart" if chooser.random() < 0.3:
                await self.restart()
            case _:
                pass

    async def submit(self) -> None:
        job = JobId(f"job-{len(self.jobs)}")
        self.jobs.append(job)
        await self.decide(submitted(self.folder, job, self.chooser.choice((UNSET, 1, 1, 2, 3))))
        effects = self.coordinator.effects
        # as its submission would have, before its status changed
        record = msgspec.json.encode(effects.records[job])
        await effects.connection.hsetnx(effects.keys.jobs, job, record)

    async def prepare(self) -> None:
        for job, entry in self.coordinator.deciders.session.state.in_hand.items():
            if entry.status == "preparing":
                await self.decide(prepared(job))
                return

    async def fail(self, worker: WorkerId) -> None:
        """End the job that a worker serves, if its run has begun."""
        owner = owner_of(self.coordinator.deciders.session.state, worker)
        if owner in self.coordinator.deciders.running() and worker in self.living:
            number = Incarnation(self.living[worker])
            await self.decide(
                WorkerFailed(job=owner, worker=worker, incarnation=number, error="no such file")
            )

    async def finish(self) -> None:
        """Let all workers join and paused jobs go on, and end what runs, until nothing is left."""
        for _ in range(3 * _MOST_JOBS):
            for worker in _WORKERS:
                if worker not in self.living:
                    await self.join(worker)
            for job in list(self.coordinator.deciders.session.state.jobs):
                await self.decide(ResumeJob(job=job))
            await self.prepare()
            for worker in _WORKERS:
                await self.fail(worker)


@pytest.mark.parametrize("seed", range(6))
async def test_each_worker_serves_one_job_and_every_job_ends(
    redis_url: str, tmp_path: Path, seed: int
) -> None:
    sessions = Sessions(tmp_path, redis_url, Random(seed))
    await sessions.start()
    for _ in range(_MOVES):
        await sessions.move()
    await sessions.finish()
    records = sessions.coordinator.effects.records
    await end(sessions.coordinator)
    assert sessions.jobs
    assert {records[job].status for job in sessions.jobs} <= ENDED_STATUSES
