"""Jobs start by priority and submission, on workers of their own, and each ends exactly once."""

from collections import deque
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec import UNSET, UnsetType

from tests.simulation.specs import small_spec
from tlt.base.id_types import Epoch, Incarnation, JobId, JobStatus, WorkerId
from tlt.policies.session.job_queue import STATUSES, SessionState, decide
from tlt.policies.session.workers_of_jobs import owner_of
from tlt.protocol.commands import (
    AssignWorker,
    CancelJob,
    ContinueJob,
    EndJob,
    PauseJob,
    PrepareJob,
    RecordStatus,
    ResumeJob,
    SessionCommand,
    StartJob,
    SuspendJob,
)
from tlt.protocol.events import (
    JobPrepared,
    JobRefused,
    JobSubmitted,
    SessionEvent,
    SessionResumed,
    WorkerJoined,
    WorkerLost,
)
from tlt.protocol.shared_values import Prepared, WorkerInfo

picks = st.integers(0, 999)
_ENDS: tuple[JobStatus, ...] = ("done", "failed", "cancelled")
_EXAMPLES = settings().max_examples


class Session(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.state = SessionState()
        self.submitted: list[JobId] = []
        self.priorities: dict[JobId, int] = {}
        self.statuses: dict[JobId, JobStatus] = {}
        self.started: list[JobId] = []
        # jobs that the coordinator actor prepares and runs
        self.preparing: deque[JobId] = deque()
        # the living workers that each run knows
        self.running: dict[JobId, dict[WorkerId, Incarnation]] = {}
        # jobs whose run has begun, and those that are giving back their workers
        self.begun: set[JobId] = set()
        self.pausing: set[JobId] = set()
        self.delivered: list[SessionEvent] = []
        self.workers: dict[WorkerId, Incarnation] = {}
        self.number = 0
        self.epoch = 0

    # --- events

    @rule(priority=st.integers(-1, 1), asked=st.sampled_from([UNSET, 1, 2, 3]))
    def submit(self, priority: int, asked: int | UnsetType) -> None:
        job = JobId(f"job{len(self.submitted)}")
        self.submitted.append(job)
        self.priorities[job] = priority
        self.statuses[job] = "queued"
        spec = small_spec(workers=asked)
        self._deliver(JobSubmitted(job=job, spec=spec, folder="/runs", priority=priority))

    @precondition(lambda self: self.submitted)
    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        """Cancel a job in any state; an ended one keeps its status."""
        job = self.submitted[pick % len(self.submitted)]
        before = self.statuses[job]
        self._deliver(CancelJob(job=job))
        if before in _ENDS:
            assert self.statuses[job] == before
        else:
            assert self.statuses[job] == "cancelled"

    @precondition(lambda self: self.submitted)
    @rule(pick=picks, shortage=st.sampled_from([None, "no room"]))
    def pause(self, pick: int, shortage: str | None) -> None:
        """A running job stays so until its workers are free."""
        job = self.submitted[pick % len(self.submitted)]
        before = self.statuses[job]
        self._deliver(PauseJob(job=job, shortage=shortage))
        assert self.statuses[job] == ("paused" if before in ("queued", "preparing") else before)

    @precondition(lambda self: self.submitted)
    @rule(pick=picks, by_session=st.booleans())
    def go_on(self, pick: int, by_session: bool) -> None:
        """Only a user ends the pause that a user asked for."""
        job = self.submitted[pick % len(self.submitted)]
        before, known = self.statuses[job], self.state.jobs.get(job)
        self._deliver(ResumeJob(job=job, by_session=by_session))
        if before != "paused":
            assert self.statuses[job] == before
            return
        assert known is not None
        assert known.pause is not None
        stays = by_session and known.pause.shortage is None
        assert (self.statuses[job] == "paused") == stays

    @precondition(lambda self: self.pausing)
    @rule(pick=picks)
    def give_back_workers(self, pick: int) -> None:
        job = sorted(self.pausing)[pick % len(self.pausing)]
        self._stop_running(job)
        self._deliver(SuspendJob(job=job))

    @precondition(lambda self: self.preparing)
    @rule(refused=st.booleans())
    def finish_preparing(self, refused: bool) -> None:
        job = self.preparing.popleft()
        if refused:
            self._deliver(JobRefused(job=job, error="no data"))
        else:
            self._deliver(JobPrepared(job=job, prepared=Prepared(train_prompts=4, eval_prompts=2)))

    @precondition(lambda self: self.running)
    @rule(pick=picks, status=st.sampled_from(_ENDS))
    def end(self, pick: int, status: JobStatus) -> None:
        job = sorted(self.running)[pick % len(self.running)]
        self._stop_running(job)
        self._deliver(EndJob(job=job, status=status, error=None))
        assert self.statuses[job] == status

    @rule()
    def resume(self) -> None:
        """Start a new coordinator, which prepares again what the old one was preparing."""
        self.preparing.clear()
        self.epoch += 1
        self._deliver(SessionResumed(epoch=Epoch(self.epoch), blobs_kept=True))
        again = [job for job, status in self.statuses.items() if status == "preparing"]
        assert sorted(self.preparing) == sorted(again)

    @rule(pick=st.integers(0, 2))
    def join(self, pick: int) -> None:
        worker = WorkerId(f"w{pick}")
        self.number += 1
        self.workers[worker] = Incarnation(self.number)
        owner = owner_of(self.state, worker)
        if owner in self.running:
            self.running[owner][worker] = Incarnation(self.number)
        self._deliver(WorkerJoined(info=self._info(worker)))
        if owner is not None and self.statuses[owner] in ("preparing", "running"):
            assert owner_of(self.state, worker) == owner, "it joins its job again"

    @precondition(lambda self: self.workers)
    @rule(pick=picks, returning=st.booleans())
    def lose(self, pick: int, returning: bool) -> None:
        worker = sorted(self.workers)[pick % len(self.workers)]
        incarnation = self.workers.pop(worker)
        for known in self.running.values():
            known.pop(worker, None)
        lost = WorkerLost(
            worker=worker, incarnation=incarnation, reason="test", returning=returning
        )
        self._deliver(lost)

    @precondition(lambda self: self.delivered)
    @rule(pick=picks)
    def redeliver(self, pick: int) -> None:
        """Deliver an old event again, which changes nothing; skip starts of coordinators."""
        event = self.delivered[pick % len(self.delivered)]
        if isinstance(event, SessionResumed | PauseJob | ResumeJob | SuspendJob):
            return
        state, commands = decide(self.state, event, 0.0)
        assert state == self.state
        assert all(isinstance(command, CancelJob) for command in commands)

    # --- commands

    def _info(self, worker: WorkerId) -> WorkerInfo:
        incarnation = self.workers[worker]
        return WorkerInfo(
            worker=worker, incarnation=incarnation, ranks=1, host="host", rendezvous="host:1"
        )

    def _check_order(self, chosen: JobId) -> None:
        """Assert that no waiting job comes first: by priority, then by submission."""
        place = {job: (-self.priorities[job], i) for i, job in enumerate(self.submitted)}
        waiting = [job for job, entry in self.state.jobs.items() if entry.status == "queued"]
        assert all(place[job] > place[chosen] for job in waiting)

    def _deliver(self, event: SessionEvent) -> None:
        self.delivered.append(event)
        self.state, commands = decide(self.state, event, 0.0)
        for command in commands:
            self._execute(command, event)

    def _execute(self, command: SessionCommand, event: SessionEvent) -> None:
        match command:
            case RecordStatus():
                assert command.status in STATUSES[self.statuses[command.job]]
                self.statuses[command.job] = command.status
            case PrepareJob():
                self.preparing.append(command.job)
                if not isinstance(event, SessionResumed):
                    self._check_order(command.job)
            case StartJob():
                assert command.job not in self.started
                self.started.append(command.job)
                self.begun.add(command.job)
                self._run(command.job, command.workers)
            case ContinueJob():
                assert command.job in self.begun
                self._check_order(command.job)
                self._run(command.job, command.workers)
                assert self.workers.items() <= command.newest_incarnations.items()
            case AssignWorker():
                assert command.job not in self.pausing
                self.running[command.job][command.info.worker] = command.info.incarnation
            case PauseJob():
                assert command.job in self.running
                assert command.job not in self.pausing
                self.pausing.add(command.job)
            case CancelJob():
                self._cancel_run(command.job)

    def _run(self, job: JobId, workers: Sequence[WorkerInfo]) -> None:
        assert job not in self.running
        self.running[job] = {info.worker: info.incarnation for info in workers}

    def _stop_running(self, job: JobId) -> None:
        self.running.pop(job, None)
        self.pausing.discard(job)

    def _cancel_run(self, job: JobId) -> None:
        """End a run, which may be paused, at once."""
        assert job in self.begun
        self._stop_running(job)
        self._deliver(EndJob(job=job, status="cancelled", error=None))

    # --- invariants

    @invariant()
    def a_worker_serves_one_job(self) -> None:
        """A run knows the workers of its job, by whichever events it was told, and no others."""
        for job, known in self.running.items():
            if job not in self.pausing:
                own = {w: i for w, i in self.workers.items() if owner_of(self.state, w) == job}
                assert known == own
        known_workers = [worker for known in self.running.values() for worker in known]
        assert len(known_workers) == len(set(known_workers))

    @invariant()
    def jobs_have_what_they_asked_for(self) -> None:
        in_hand = self.state.in_hand
        busy = {job for job, s in self.statuses.items() if s in ("preparing", "running")}
        assert in_hand.keys() == busy
        assert len(in_hand) == 1 or not any(entry.runs_alone for entry in in_hand.values())
        for entry in in_hand.values():
            assert len(set(entry.workers)) == (entry.spec.workers.asked or 0)
        waiting = (entry for entry in self.state.jobs.values() if not entry.in_hand)
        assert not any(entry.workers for entry in waiting)

    @invariant()
    def no_worker_is_free_in_vain(self) -> None:
        """No job lacks one, and the first of the queue needs more than there are."""
        free = [worker for worker in self.workers if owner_of(self.state, worker) is None]
        for entry in self.state.in_hand.values():
            lost = set(entry.workers) - self.workers.keys() - self.state.returning_workers
            assert not (free and lost and entry.pause is None)
        waiting = [job for job, entry in self.state.jobs.items() if entry.status == "queued"]
        if waiting:
            first = max(waiting, key=lambda job: (self.priorities[job], -self.submitted.index(job)))
            asked = self.state.jobs[first].spec.workers.asked
            assert self.state.in_hand if asked is None else len(free) < asked

    @invariant()
    def records_agree(self) -> None:
        open_ = {j: s for j, s in self.statuses.items() if s not in _ENDS}
        assert {j: entry.status for j, entry in self.state.jobs.items()} == open_
        assert {w: i.incarnation for w, i in self.state.workers.items()} == self.workers

    def teardown(self) -> None:
        """Let all workers join and paused jobs go on, run all, and assert that they end."""
        self.resume()
        while self.pausing:
            self.give_back_workers(0)
        for job in self.submitted:
            self._deliver(ResumeJob(job=job))
        for pick in range(3):
            self.join(pick)
        for _ in range(2 * len(self.submitted) + 1):
            if self.preparing:
                self.finish_preparing(refused=False)
            if self.running:
                self.end(0, "done")
        assert all(status in _ENDS for status in self.statuses.values())


Session.TestCase.settings = settings(max_examples=_EXAMPLES // 2, stateful_step_count=40)
TestSession = Session.TestCase
