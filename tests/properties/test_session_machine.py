"""Jobs run one at a time, in the order of submission, and each of them ends exactly once."""

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.simulation.specs import small_spec
from tlt.id_types import Epoch, Incarnation, JobId, JobStatus, WorkerId
from tlt.policies.job.job_queue import STATUSES, SessionState, decide
from tlt.protocol.commands import CancelJob, PrepareJob, RecordStatus, SessionCommand, StartJob
from tlt.protocol.events import (
    JobCancelRequested,
    JobEnded,
    JobPrepared,
    JobRefused,
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
        self.prepared: list[JobId] = []
        self.started: list[JobId] = []
        # jobs that the coordinator actor prepares and runs
        self.preparing: deque[JobId] = deque()
        self.running: JobId | None = None
        self.cancelling: set[JobId] = set()
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
        if before in ("queued", "preparing"):
            assert self.statuses[job] == "cancelled"
        else:
            assert self.statuses[job] == before

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
        job, self.running = self.running, None
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
        if isinstance(event, SessionResumed):
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

    def _next(self) -> JobId:
        """Return the waiting job of the highest priority, of equals the first one."""
        waiting = [job for job in self.submitted if self.statuses[job] == "queued"]
        highest = max(self.priorities[job] for job in waiting)
        return next(job for job in waiting if self.priorities[job] == highest)

    def _deliver(self, event: SessionEvent) -> None:
        self.delivered.append(event)
        self.state, commands = decide(self.state, event, 0.0)
        # what is to be prepared is compared with what waited before
        for command in sorted(commands, key=lambda each: isinstance(each, RecordStatus)):
            self._execute(command)

    def _execute(self, command: SessionCommand) -> None:
        match command:
            case RecordStatus():
                assert command.status in STATUSES[self.statuses[command.job]]
                self.statuses[command.job] = command.status
            case PrepareJob():
                if command.job not in self.prepared:
                    assert command.job == self._next()
                    self.prepared.append(command.job)
                self.preparing.append(command.job)
            case StartJob():
                assert self.running is None
                assert command.job not in self.started
                self.started.append(command.job)
                self.running = command.job
                infos = {info.worker: info.incarnation for info in command.workers}
                assert infos == self.workers
            case CancelJob():
                assert self.running == command.job

    # --- invariants

    @invariant()
    def at_most_one_is_in_hand(self) -> None:
        busy = [job for job, s in self.statuses.items() if s in ("preparing", "running")]
        assert len(busy) <= 1
        assert busy == ([] if self.state.current is None else [self.state.current])

    @invariant()
    def started_in_the_order_of_preparation(self) -> None:
        assert [job for job in self.prepared if job in self.started] == self.started

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
        """Prepare and run the remaining jobs, and assert that all jobs end."""
        self.resume()
        for _ in range(2 * len(self.submitted) + 1):
            if self.preparing:
                self.finish_preparing(refused=False)
            if self.running is not None:
                self.end("done")
        assert all(status in _ENDS for status in self.statuses.values())


Session.TestCase.settings = settings(max_examples=_EXAMPLES // 2, stateful_step_count=40)
TestSession = Session.TestCase
