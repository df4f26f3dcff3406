"""Jobs that ask for a number of workers run at once, each on workers of its own."""

import pytest
from msgspec import UNSET, UnsetType

from tests.simulation.specs import small_spec
from tlt.base.id_types import Incarnation, JobId, WorkerId
from tlt.policies.run import coordinator
from tlt.policies.run.run_state import RunState
from tlt.policies.session.job_queue import SessionState, decide
from tlt.policies.session.workers_of_jobs import living_workers, owner_of
from tlt.protocol.commands import (
    AssignWorker,
    ContinueJob,
    EndJob,
    PauseJob,
    PrepareJob,
    RequeuePrompts,
    ResumeJob,
    SessionCommand,
    StartJob,
    SuspendJob,
)
from tlt.protocol.events import (
    JobPrepared,
    JobSubmitted,
    SessionEvent,
    WorkerJoined,
    WorkerLost,
    WorkerReplaced,
)
from tlt.protocol.shared_values import Prepared, WorkerInfo

A, B, C = JobId("a"), JobId("b"), JobId("c")
W0, W1, W2 = WorkerId("w0"), WorkerId("w1"), WorkerId("w2")


def info(worker: WorkerId, incarnation: int, host: str = "host") -> WorkerInfo:
    return WorkerInfo(
        worker=worker,
        incarnation=Incarnation(incarnation),
        ranks=1,
        host=host,
        rendezvous=f"{host}:{incarnation}",
    )


def joined(worker: WorkerId, incarnation: int, host: str = "host") -> WorkerJoined:
    return WorkerJoined(info=info(worker, incarnation, host))


def lost(worker: WorkerId, incarnation: int, *, returning: bool = False) -> WorkerLost:
    return WorkerLost(
        worker=worker, incarnation=Incarnation(incarnation), reason="test", returning=returning
    )


def submitted(job: JobId, workers: int | UnsetType, priority: int = 0) -> JobSubmitted:
    spec = small_spec(workers=workers)
    return JobSubmitted(job=job, spec=spec, folder=f"/runs/{job}", priority=priority)


def prepared(job: JobId) -> JobPrepared:
    return JobPrepared(job=job, prepared=Prepared(train_prompts=8, eval_prompts=0))


def ended(job: JobId) -> EndJob:
    return EndJob(job=job, status="done", error=None)


class Session:
    """A session that decides events, and keeps the commands of the last one."""

    def __init__(self, *events: SessionEvent) -> None:
        self.state = SessionState()
        self.commands: list[SessionCommand] = []
        self.decide(*events)

    def decide(self, *events: SessionEvent) -> None:
        for event in events:
            self.state, self.commands = decide(self.state, event, 0.0)

    def statuses(self) -> dict[JobId, str]:
        return {job: entry.status for job, entry in self.state.jobs.items()}

    def workers_of(self, job: JobId) -> list[WorkerId]:
        return [each.worker for each in living_workers(self.state, job)]

    def assigned(self) -> list[tuple[JobId, WorkerId]]:
        assigned = [each for each in self.commands if isinstance(each, AssignWorker)]
        return [(each.job, each.info.worker) for each in assigned]


def two_jobs(*more: SessionEvent) -> Session:
    """Return a session of which A and B have a worker each, and both run."""
    return Session(
        joined(W0, 1), joined(W1, 2), submitted(A, 1), submitted(B, 1), prepared(A), prepared(B),
        *more,
    )  # fmt: skip


def test_starts_jobs_as_long_as_workers_are_free() -> None:
    session = Session(joined(W0, 1), joined(W1, 2), submitted(A, 1), submitted(B, 1))
    assert session.statuses() == {A: "preparing", B: "preparing"}
    session.decide(prepared(B))
    (start,) = [each for each in session.commands if isinstance(each, StartJob)]
    assert [each.worker for each in start.workers] == [W1]
    assert session.workers_of(A) == [W0]
    session.decide(submitted(C, 1), ended(B))
    assert any(isinstance(each, PrepareJob) and each.job == C for each in session.commands)
    assert session.workers_of(C) == [W1]


def test_a_job_behind_one_that_waits_for_more_workers_waits_with_it() -> None:
    session = Session(joined(W0, 1), joined(W1, 2), submitted(A, 1), submitted(B, 2))
    session.decide(submitted(C, 1))
    assert session.statuses() == {A: "preparing", B: "queued", C: "queued"}
    session.decide(prepared(A), ended(A))
    assert session.statuses() == {B: "preparing", C: "queued"}
    # C has no worker, so that only B can be meant
    session.decide(prepared(B), ended(B))
    assert session.statuses() == {C: "preparing"}


def test_of_waiting_jobs_one_of_the_highest_priority_gets_the_free_workers() -> None:
    session = Session(joined(W0, 1), submitted(A, 1), submitted(B, 1), submitted(C, 1, priority=1))
    session.decide(ended(A), prepared(A), ended(A))
    assert session.statuses() == {B: "queued", C: "preparing"}


def test_a_job_that_asks_for_no_number_runs_alone() -> None:
    session = Session(joined(W0, 1), submitted(A, UNSET), submitted(B, 1), joined(W1, 2))
    assert session.statuses() == {A: "preparing", B: "queued"}
    assert session.workers_of(A) == [W0, W1]
    session.decide(submitted(C, UNSET), prepared(A), ended(A))
    assert session.statuses() == {B: "preparing", C: "queued"}


def test_waits_until_enough_workers_have_joined() -> None:
    session = Session(submitted(A, 2), joined(W0, 1))
    assert session.statuses() == {A: "queued"}
    session.decide(joined(W1, 2))
    assert session.statuses() == {A: "preparing"}


def test_takes_workers_of_one_host() -> None:
    session = Session(
        joined(W0, 1, "near"), joined(W1, 2, "far"), joined(W2, 3, "far"), submitted(A, 2)
    )
    assert session.workers_of(A) == [W1, W2]


def test_a_worker_that_is_back_joins_its_job_again() -> None:
    session = two_jobs(lost(W0, 1), lost(W1, 2))
    session.decide(joined(W1, 3))
    assert (session.workers_of(A), session.workers_of(B)) == ([], [W1])
    session.decide(joined(W0, 4))
    assert (session.workers_of(A), session.workers_of(B)) == ([W0], [W1])
    assert session.assigned() == []  # it is its run's all along, which hears of it as before


@pytest.mark.parametrize("free_before", [True, False])
def test_a_free_worker_takes_the_place_of_a_lost_one(free_before: bool) -> None:
    session = two_jobs()
    loss, free = lost(W1, 2), joined(W2, 3)
    session.decide(*((free, loss) if free_before else (loss, free)))
    assert session.assigned() == [(B, W2)]
    assert (session.workers_of(A), session.workers_of(B)) == ([W0], [W2])
    session.decide(joined(W1, 4))
    assert owner_of(session.state, W1) is None


def test_a_worker_that_is_starting_fresh_ranks_is_waited_for() -> None:
    session = two_jobs(joined(W2, 3), lost(W1, 2, returning=True))
    assert session.assigned() == []
    session.decide(joined(W1, 4))
    assert session.workers_of(B) == [W1]


@pytest.mark.parametrize("end", [lost(W1, 2), lost(W1, 4, returning=True)])
def test_a_worker_whose_fresh_ranks_fail_is_not_waited_for(end: WorkerLost) -> None:
    """Its lease ends, or the ranks of its next incarnation don't start."""
    session = two_jobs(joined(W2, 3), lost(W1, 2, returning=True), end)
    assert session.assigned() == [(B, W2)]


def test_a_job_that_is_being_paused_gets_no_workers() -> None:
    session = two_jobs(joined(W2, 3), PauseJob(job=B), lost(W1, 2))
    assert session.assigned() == []
    session.decide(SuspendJob(job=B))
    assert session.statuses() == {A: "running", B: "paused"}
    session.decide(submitted(C, 1), prepared(C))
    assert session.workers_of(C) == [W2]


def test_a_paused_job_goes_on_on_whichever_workers_are_free() -> None:
    session = two_jobs(PauseJob(job=A), lost(W0, 1, returning=True), SuspendJob(job=A))
    session.decide(submitted(C, 1), joined(W0, 3), prepared(C), ResumeJob(job=A))
    assert session.statuses() == {A: "queued", B: "running", C: "running"}
    session.decide(ended(B))
    (resume,) = [each for each in session.commands if isinstance(each, ContinueJob)]
    assert [each.worker for each in resume.workers] == [W1]


# --- what a run makes of it


def started(workers: int | UnsetType) -> RunState:
    """Return a run on w0 and w1."""
    spec = small_spec(workers=workers)
    event = StartJob(
        job=A, epoch=coordinator.Epoch(1), spec=spec, folder="/runs/a",
        prepared=prepared(A).prepared, workers=(info(W0, 1), info(W1, 2)),
    )  # fmt: skip
    state, _ = coordinator.decide(coordinator.new_run(A, spec), event, 0.0)
    return state


def test_a_run_forgets_a_worker_that_others_have_replaced() -> None:
    """Its prompts are written again: it may have taken some after its lease had ended."""
    state, _ = coordinator.decide(started(2), lost(W1, 2, returning=True), 1.0)
    assert state.returning_workers == {W1}
    state, commands = coordinator.decide(state, WorkerReplaced(job=A, worker=W1), 2.0)
    assert (state.newest_incarnations, state.returning_workers) == ({W0: 1}, set())
    assert [c.incarnation for c in commands if isinstance(c, RequeuePrompts)] == [2]


def test_a_run_keeps_a_worker_that_it_has() -> None:
    state = started(2)
    assert coordinator.decide(state, WorkerReplaced(job=A, worker=W1), 1.0) == (state, [])


def test_a_resumed_run_knows_no_other_jobs_workers() -> None:
    """Reports would count the time of those as this job's."""
    state = started(2)
    for event in (PauseJob(job=A), lost(W0, 1, returning=True), lost(W1, 2)):
        state, _ = coordinator.decide(state, event, 1.0)
    newest = {W0: Incarnation(4), W1: Incarnation(2), W2: Incarnation(3)}
    resumed = ContinueJob(job=A, workers=(info(W2, 3),), newest_incarnations=newest)
    state, commands = coordinator.decide(state, resumed, 2.0)
    assert state.newest_incarnations == {W2: 3, W1: 2}
    assert [c.incarnation for c in commands if isinstance(c, RequeuePrompts)] == [1]
