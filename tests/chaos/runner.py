"""Submit jobs, inject their faults one after the other, and check each job at its end."""

import shutil
import time
from itertools import cycle
from pathlib import Path
from random import Random

from benchmarks.stacks import ROOT
from tests.chaos.checks import Findings, check_job
from tests.chaos.fault import Chaos, NotNow
from tests.chaos.plan import FAULTS
from tests.chaos.results import CheckedJob, Injected, Results
from tests.chaos.session import Session, until
from tlt.errors import JournalError
from tlt.runs.run_folder_reader import read_ledger

SPEC = ROOT / "configs" / "tiny-reasoner.yaml"
# a small batch, so that steps are short, and none of the limits on losses
CHANGES = (
    *("algorithm.steps=4", "algorithm.prompts_per_step=4", "algorithm.group_size=8"),
    *("algorithm.checkpoint_every=2", "algorithm.eval_every=2", "data.eval_limit=12"),
    *("algorithm.minibatches=2", "algorithm.collective_timeout_seconds=30"),
    *("rollout.max_new_tokens=300", "rollout.slots=8", "rollout.max_tries=1000"),
    *("workers.max_restarts=1000", "workers.stuck_seconds=60", "loggers=[tensorboard]"),
)
# jobs by turns: steps that wait for all answers, cut the longest, put them off, or overlap
MODES = ((), ("rollout.partial=0.5",), ("rollout.defer_long=0.5",), ("algorithm.staleness=1",))
_BOUND_SECONDS, _JOB_SECONDS = 180.0, 600.0
_TRIES = 8
# entries of the journal between two faults, at most
_MOST_ENTRIES = 40


class Runner:
    def __init__(
        self,
        dice: Random,
        results: Results,
        changes: tuple[str, ...] = CHANGES,
        ahead: bool = True,
    ) -> None:
        """Keep a job waiting if `ahead`, so that it is prepared while another runs."""
        self.session: Session | None = None
        self.results = results
        # the last one that was tried
        self.fault = ""
        self._dice = dice
        self._changes = changes
        self._modes = cycle(MODES)
        self._ahead = ahead
        # those that hit the present job
        self._faults = 0
        self._waiting: str | None = None

    def use(self, session: Session) -> None:
        """Submit the next jobs to this session."""
        self.session, self._waiting = session, None
        self.chaos = Chaos(session, self._dice)

    def run_job(self, faults: tuple[str, ...]) -> None:
        """Inject faults into a job, and into further ones where it ends before."""
        self.fault = "before the first fault"
        self._begin_job()
        for fault in faults:
            self._inject(fault)
        self._finish()

    def _begin_job(self) -> None:
        """Go on with the job that waits, or with a new one."""
        self.chaos.job = self._waiting or self._submit()
        self.chaos.damaged, self.chaos.refusal, self._faults = set(), None, 0
        self._waiting = self._submit() if self._ahead else None

    def _submit(self) -> str:
        seed = self.chaos.dice.randrange(1 << 20)
        changes = (*self._changes, *next(self._modes), f"seed={seed}")
        return self.chaos.session.live.submit(SPEC, *changes)

    def _inject(self, fault: str) -> None:
        for _ in range(_TRIES):
            self._await_work()
            began = self._now()
            self.fault, self.chaos.freed_at = fault, 0.0
            try:
                healed = FAULTS[fault](self.chaos)
            except NotNow:
                continue
            freed = self.chaos.freed_at or time.monotonic()
            self._faults += 1
            self._await_recovery(fault, healed)
            seconds = round(time.monotonic() - freed, 2)
            self.results.injected.append(Injected(fault, self.chaos.job, seconds))
            print(f"{began} {self.chaos.job}: {fault}: {seconds:.1f} s", flush=True)
            return
        skipped = self.results.skipped
        skipped[fault] = skipped.get(fault, 0) + 1

    def _await_work(self) -> None:
        """Wait until the job has gone on by some entries; submit another if it has ended."""
        chaos = self.chaos
        wanted = chaos.session.committed(chaos.job).entries + chaos.dice.randint(1, _MOST_ENTRIES)
        until(lambda: self._has_reached(wanted), f"{chaos.job} to go on", _BOUND_SECONDS)
        if chaos.session.ended(chaos.job):
            self._finish()
            self._begin_job()
            until(lambda: self._has_reached(1), f"{chaos.job} to begin", _BOUND_SECONDS)

    def _has_reached(self, entries: int) -> bool:
        session, job = self.chaos.session, self.chaos.job
        return session.committed(job).entries >= entries or session.ended(job)

    def _await_recovery(self, fault: str, healed: object) -> None:
        session, job = self.chaos.session, self.chaos.job
        found: list[int] = []
        until(lambda: found.append(session.committed(job).entries) or True, "Redis")
        if callable(healed):
            until(healed, f"what '{fault}' has hit to be back", _BOUND_SECONDS)
        until(session.all_up, f"all processes to be up after '{fault}'", _BOUND_SECONDS)
        until(
            lambda: self._has_reached(found[-1] + 1),
            f"{job} to go on after '{fault}'",
            _BOUND_SECONDS,
        )

    def _finish(self) -> None:
        """Wait for the job's end and check what it has counted."""
        chaos = self.chaos
        until(lambda: chaos.session.ended(chaos.job), f"{chaos.job} to end", _JOB_SECONDS)
        record = chaos.session.record(chaos.job)
        run = chaos.session.run(chaos.job)
        if chaos.refusal is None:
            findings = check_job(run, chaos.damaged)
        else:
            findings = _check_refusal(run, chaos.refusal, record.status, record.error or "")
        self.results.jobs.append(CheckedJob(chaos.job, record.status, self._faults, findings))
        print(f"{self._now()} {chaos.job}: {record.status}, {record.error}, {findings}", flush=True)
        # the session's disk is small
        shutil.rmtree(run, ignore_errors=True)

    def _now(self) -> str:
        return time.strftime("%H:%M:%S")


def _check_refusal(run: Path, named: str, status: str, error: str) -> Findings:
    """Check that a job whose journal was damaged failed by name, for every reader."""
    notes: list[str] = []
    if status != "failed" or named not in error:
        notes.append(f"its damaged journal wasn't refused: it is {status}: {error}")
    try:
        read_ledger(run)
        notes.append("its damaged journal was read")
    except JournalError as complaint:
        if named not in str(complaint):
            notes.append(f"the journal isn't named: {complaint}")
    return Findings(0, 0, len(notes), 0, 0, tuple(notes))
