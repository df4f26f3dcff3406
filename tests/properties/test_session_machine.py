"""Jobs run one at a time, by priority and submission, and each of them ends exactly once."""

from collections import deque
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.simulation.specs import small_spec
from tlt.id_types import Epoch, Incarnation, JobId, JobStatus, WorkerId
from tlt.policies.job.job_queue import STATUSES, SessionState, decide
from tlt.protocol.commands import (
    CancelJob,
    PauseJob,
    PrepareJob,
    RecordStatus,
    ResumeJob,
    SessionCommand,
    StartJob,
)
from tlt.protocol.events import (
    JobCancelRequested,
    JobEnded,
    JobPaused,
    JobPauseRequested,
    JobPrepared,
    JobRefused,
    JobResumeRequested,
    JobSubmitted,
    SessionEvent,
    SessionResumed,
    WorkerJoined,
    WorkerLost,
)
from tlt.protocol.shared_values import WorkerInfo

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
        self.running: JobId | None = None
        # jobs whose run has begun, and the one that is giving back its workers
        self.begun: set[JobId] = set()
        self.pausing: JobId | None = None
        self.delivered: list[SessionEvent] = []
        self.workers: dict[WorkerId, Incarnation] = {}
        self.number = 0
        self.epoch = 0

    # --- events

    @rule(priority=st.integers(-1, 1))
    def submit(self, priority: int) -> None:
        job = JobId(f"job{len(self.submitted)}")
        self.submitted.append(job)
        self.priorities[job] = priority
        self.statuses[job] = "queued"
        self._deliver(JobSubmitted(job=job, spec=small_spec(), folder="/runs", priority=priority))

    @precondition(lambda self: self.submitted)
    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        """Cancel a job in any state; an ended one keeps its status."""
        job = self.submitted[pick % len(self.submitted)]
        before = self.statuses[job]
        self._deliver(JobCancelRequested(job=job))
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
        self._deliver(JobPauseRequested(job=job, shortage=shortage))
        if before in ("queued", "preparing"):
            assert self.statuses[job] == "paused"
        else:
            assert self.statuses[job] == before

    @precondition(lambda self: self.submitted)
    @rule(pick=picks, by_session=st.booleans())
    def go_on(self, pick: int, by_session: bool) -> None:
        """Only a user ends the pause that a user asked for."""
        job = self.submitted[pick % len(self.submitted)]
        before, known = self.statuses[job], self.state.jobs.get(job)
        self._deliver(JobResumeRequested(job=job, by_session=by_session))
        if before != "paused":
            assert self.statuses[job] == before
            return
        assert known is not None
        assert known.pause is not None
        stays = by_session and known.pause.shortage is None
        assert (self.statuses[job] == "paused") == stays

    @precondition(lambda self: self.pausing is not None)
    @rule()
    def give_back_workers(self) -> None:
        job, self.pausing, self.running = self.pausing, None, None
        assert job is not None
        self._deliver(JobPaused(job=job))

    @precondition(lambda self: self.preparing)
    @rule(refused=st.booleans())
    def finish_preparing(self, refused: bool) -> None:
        job = self.preparing.popleft()
        if refused:
            self._deliver(JobRefused(job=job, error="no data"))
        else:
            self._deliver(JobPrepared(job=job, train_prompts=4, eval_prompts=2))

    @precondition(lambda self: self.running is not None)
    @rule(status=st.sampled_from(_ENDS))
    def end(self, status: JobStatus) -> None:
        assert self.running is not None
        job, self.running, self.pausing = self.running, None, None
        self._deliver(JobEnded(job=job, status=status, error=None))
        assert self.statuses[job] == status

    @rule()
    def resume(self) -> None:
        """Start a new coordinator, which prepares again what the old one was preparing."""
        self.preparing.clear()
        self.epoch += 1
        self._deliver(SessionResumed(epoch=Epoch(self.epoch), blobs_kept=True))
        current = self.state.current
        if current is not None and self.statuses[current] == "preparing":
            assert list(self.preparing) == [current]

    @rule(pick=st.integers(0, 2))
    def join(self, pick: int) -> None:
        worker = WorkerId(f"w{pick}")
        self.number += 1
        self.workers[worker] = Incarnation(self.number)
        self._deliver(WorkerJoined(info=self._info(worker)))

    @precondition(lambda self: self.workers)
    @rule(pick=picks, returning=st.booleans())
    def lose(self, pick: int, returning: bool) -> None:
        worker = sorted(self.workers)[pick % len(self.workers)]
        incarnation = self.workers.pop(worker)
        lost = WorkerLost(
            worker=worker, incarnation=incarnation, reason="test", returning=returning
        )
        self._deliver(lost)

    @precondition(lambda self: self.delivered)
    @rule(pick=picks)
    def redeliver(self, pick: int) -> None:
        """Deliver an old event again, which changes nothing; skip starts of coordinators."""
        event = self.delivered[pick % len(self.delivered)]
        if isinstance(event, SessionResumed | JobPauseRequested | JobResumeRequested | JobPaused):
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
                assert self.running is None
                assert command.job not in self.started
                self.started.append(command.job)
                self.running = command.job
                self.begun.add(command.job)
                self._check_workers(command.workers)
            case ResumeJob():
                assert self.running is None
                assert command.job in self.begun
                self._check_order(command.job)
                self.running = command.job
                self._check_workers(command.workers)
                assert self.workers.items() <= command.newest_incarnations.items()
            case PauseJob():
                assert self.running == command.job
                assert self.pausing is None
                self.pausing = command.job
            case CancelJob():
                self._cancel_run(command.job)

    def _check_workers(self, workers: Sequence[WorkerInfo]) -> None:
        assert {info.worker: info.incarnation for info in workers} == self.workers

    def _cancel_run(self, job: JobId) -> None:
        """End a run, which may be paused, at once."""
        assert job in self.begun
        if self.running == job:
            self.running, self.pausing = None, None
        self._deliver(JobEnded(job=job, status="cancelled", error=None))

    # --- invariants

    @invariant()
    def at_most_one_is_in_hand(self) -> None:
        busy = [job for job, s in self.statuses.items() if s in ("preparing", "running")]
        assert len(busy) <= 1
        assert busy == ([] if self.state.current is None else [self.state.current])

    @invariant()
    def queued_jobs_wait_for_a_current_one(self) -> None:
        if "queued" in self.statuses.values():
            assert self.state.current is not None

    @invariant()
    def records_agree(self) -> None:
        open_ = {j: s for j, s in self.statuses.items() if s not in _ENDS}
        assert {j: entry.status for j, entry in self.state.jobs.items()} == open_
        assert {w: i.incarnation for w, i in self.state.workers.items()} == self.workers

    def teardown(self) -> None:
        """Let paused jobs go on, prepare and run all, and assert that they end."""
        self.resume()
        if self.pausing is not None:
            self.give_back_workers()
        for job in self.submitted:
            self._deliver(JobResumeRequested(job=job))
        for _ in range(2 * len(self.submitted) + 1):
            if self.preparing:
                self.finish_preparing(refused=False)
            if self.running is not None:
                self.end("done")
        assert all(status in _ENDS for status in self.statuses.values())


Session.TestCase.settings = settings(max_examples=_EXAMPLES // 2, stateful_step_count=40)
TestSession = Session.TestCase
