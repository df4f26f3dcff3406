"""What a run was like, folded from its journal.

The fold drives `decide` over the journal's events and watches the state: seconds by duty and by
phase are what the coordinator itself believed, and what it did not count is not counted here.
"""

from typing import cast

import msgspec

from tlt.config import JobSpec
from tlt.ids import JobId, JobStatus, Step
from tlt.policies import coordinator
from tlt.policies.job.run_state import Phase, RunState
from tlt.policies.speculation import savings_estimate
from tlt.protocol.commands import (
    Command,
    CommitBestPolicy,
    FinishRun,
    IssuePrompts,
    RecordRolloutBatch,
)
from tlt.protocol.events import (
    AnyEvent,
    DecodingReported,
    JobStarted,
    PolicyPublished,
    PolicyUpdateFinished,
    RolloutFinished,
    RunEvent,
    WorkerIdled,
)
from tlt.report.accepted_tokens import Accepted
from tlt.report.answer_lengths import Answers, spread
from tlt.report.drafter_training import Drafted
from tlt.report.energy import Energy
from tlt.report.run_summary import (
    EvalSummary,
    Rollout,
    Snapshot,
    StepAccount,
    StepSummary,
    StoredPolicy,
)
from tlt.report.savings import Savings
from tlt.report.statistics import mean, standard_error
from tlt.report.time_by_duty import EVERYBODY, FIRST, Wall


class Ledger:
    """`by_worker`: whether it can tell of each step and worker; of many it takes memory."""

    def __init__(self, job: JobId, spec: JobSpec, by_worker: bool = True) -> None:
        self.spec = spec
        self._by_worker = by_worker
        self._state = coordinator.new_run(job, spec)
        self._began: float | None = None
        self._now = 0.0
        # seconds of the state as it is that nobody was told of yet: most entries change no duty,
        # and every worker is charged for each stretch
        self._pending = 0.0
        self._status: JobStatus = "running"
        self._error: str | None = None
        self._wall = Wall(by_worker)
        self._savings = Savings()
        self._accepted = Accepted()
        self._drafted = Drafted()
        self._energy = Energy()
        self._round = Answers(0.0)
        self._rollouts: dict[Step, Rollout] = {}
        # tokens of training rollouts, and those that updates learned from
        self._generated = 0
        self._trained = 0
        self._learn_began = 0.0
        self.steps: list[StepSummary] = []
        self.evals: list[EvalSummary] = []
        self._best: StoredPolicy | None = None

    @property
    def ended(self) -> bool:
        return self._state.phase is Phase.ENDED

    @property
    def state(self) -> RunState:
        """What the coordinator believes after the last entry."""
        return self._state

    @property
    def batch(self) -> Answers:
        """Of the round in hand, or of the last one."""
        return self._round

    def add(self, event: AnyEvent, at: float) -> list[Command]:
        """The journal's next entry; returns what was commanded."""
        before = self._state
        if isinstance(event, JobStarted):
            self._began = self._now = at
        self._pass_time(before, at)
        # The journal holds nothing but what this job's `decide` consumed.
        self._state, commands = coordinator.decide(before, cast("RunEvent", event), at)
        if _spends_otherwise(before, self._state):
            self._charge(before)
        if self._state.batch is not before.batch:
            self._round.add(event, self._now, self._pending)
        self._watch(before, event)
        for command in commands:
            self._note(command)
        if isinstance(event, PolicyPublished) and self._state.version > before.version:
            self._learned(event)
        return list(commands)

    def snapshot(self, since: Step = FIRST) -> Snapshot:
        """With accounts of the steps from `since` on."""
        state = self._state
        self._charge(state)
        expected = unsettled = 0
        if state.batch is not None:
            expected = sum(len(group.members) for group in state.batch.groups.values())
            unsettled = state.batch.unsettled
        checkpoint = state.checkpoint
        return Snapshot(
            job=state.job,
            status=self._status,
            error=self._error,
            phase=state.phase,
            step=state.step,
            steps_planned=state.spec.algorithm.steps,
            version=state.version,
            settled=expected - unsettled,
            expected=expected,
            seconds=0.0 if self._began is None else self._now - self._began,
            phases=dict(self._wall.phases),
            workers=self._wall.workers(),
            device_seconds=self._wall.device_seconds,
            joules=self._energy.total(),
            losses=state.losses,
            accounts=self._accounts(since),
            saved=savings_estimate.estimate_savings(state.decode_costs),
            gave_up=not state.speculation_allowed,
            acceptance=self._accepted.table(),
            positions=self._accepted.positions(),
            by_drafter=self._accepted.by_drafter(),
            trained=self._trained / max(1, self._generated),
            drafting=self._drafted.account(),
            steps=tuple(self.steps),
            evals=tuple(self.evals),
            last=None
            if checkpoint is None
            else StoredPolicy(version=checkpoint.version, weights=checkpoint.weights),
            best=self._best,
        )

    def _accounts(self, since: Step) -> tuple[StepAccount, ...]:
        rates = savings_estimate.PlainRates(self._state.decode_costs)
        found: list[StepAccount] = []
        for step, time in self._wall.steps(since):
            in_all, critical = self._savings.of(step, rates)
            found.append(
                StepAccount(
                    step=step,
                    seconds=time.seconds,
                    device_seconds=time.device_seconds,
                    workers={worker: dict(duties) for worker, duties in time.workers.items()},
                    joules=self._energy.of(step),
                    rollout=self._rollouts.get(step),
                    saved=in_all,
                    critical=critical,
                )
            )
        return tuple(found)

    def _pass_time(self, state: RunState, at: float) -> None:
        if state.phase in (Phase.STARTING, Phase.ENDED):
            return
        self._pending += max(0.0, at - self._now)
        self._now = max(self._now, at)

    def _charge(self, state: RunState) -> None:
        passed, self._pending = self._pending, 0.0
        if state.phase in (Phase.STARTING, Phase.ENDED):
            return
        self._wall.pass_time(state, passed)
        self._drafted.pass_time(state, passed)
        if state.batch is not None:
            self._round.pass_time(state, passed)

    def _watch(self, before: RunState, event: AnyEvent) -> None:
        """What changed how the run is seen."""
        after = self._state
        self._drafted.watch(before, event, after)
        match event:
            case RolloutFinished() if after.batch is not before.batch:
                self._accepted.follow(event.origins, event.drafters)
                if event.purpose == "train":
                    self._savings.finishes(event.step, event.worker)
            case DecodingReported() if after.decode_costs is not before.decode_costs:
                self._savings.add(event, self._now)
                self._accepted.add(event.tallies)
            case PolicyUpdateFinished() if (worker := after.workers.get(event.worker)) is not None:
                self._energy.add(event, worker.info.host)
            case WorkerIdled(purpose="train") if after.workers is not before.workers:
                self._savings.idles(event.step, self._now)
            case _:
                pass

    def _note(self, command: Command) -> None:
        self._drafted.note(self._state, command)
        match command:
            case IssuePrompts():
                self._round = Answers(self._now)
                self._savings.opens(self._state)
            case RecordRolloutBatch(purpose="eval"):
                self.evals.append(self._eval(command))
            case RecordRolloutBatch():
                self._close(command)
                self.steps.append(self._step(command))
                self._learn_began = self._now
            case CommitBestPolicy() if command.policy.weights is not None:
                self._best = StoredPolicy(
                    version=command.policy.version, weights=command.policy.weights
                )
            case FinishRun():
                self._status, self._error = command.status, command.error
            case _:
                pass

    def _close(self, closed: RecordRolloutBatch) -> None:
        plan = self._state.plans.get(closed.version)
        trained = 0 if plan is None else sum(sample.length for sample in plan.samples)
        rollout = self._round.rollout(trained)
        self._rollouts[closed.step] = rollout if self._by_worker else _of_all(rollout)
        self._trained += trained
        self._generated += sum(self._round.lengths)

    def _eval(self, closed: RecordRolloutBatch) -> EvalSummary:
        rewards = closed.rewards
        return EvalSummary(
            step=closed.step,
            version=closed.version,
            mean=mean(rewards),
            stderr=standard_error(rewards),
            problems=len(rewards),
            length=spread(self._round.lengths),
            seconds=self._now - self._round.began,
        )

    def _step(self, closed: RecordRolloutBatch) -> StepSummary:
        sums = self._round
        plan = self._state.plans.get(closed.version)
        taught = set() if plan is None else {sample.prompt for sample in plan.samples}
        return StepSummary(
            step=closed.step,
            reward=mean(closed.rewards),
            rollouts=len(closed.rewards),
            dropped=sums.dropped,
            unscored=sums.unscored,
            agreed=self.spec.algorithm.prompts_per_step - len(taught),
            tokens=sum(sums.lengths),
            length=spread(sums.lengths),
            clipped=sums.clipped / max(1, len(sums.lengths)),
            rollout_seconds=self._now - sums.began,
        )

    def _learned(self, event: PolicyPublished) -> None:
        self.steps[-1] = msgspec.structs.replace(
            self.steps[-1],
            learn_seconds=self._now - self._learn_began,
            metrics=event.metrics,
        )


def _spends_otherwise(before: RunState, after: RunState) -> bool:
    """Whether time is spent otherwise from now on."""
    if (
        after.phase is not before.phase
        or after.step != before.step
        or after.newest_incarnations is not before.newest_incarnations
        or (after.batch is None) is not (before.batch is None)
    ):
        return True
    if after.workers is before.workers:
        return False
    was = before.workers
    if len(was) != len(after.workers):
        return True
    for worker, known in after.workers.items():
        old = was.get(worker)
        if old is not known and (
            old is None or old.duty is not known.duty or old.info is not known.info
        ):
            return True
    return False


def _of_all(rollout: Rollout) -> Rollout:
    return msgspec.structs.replace(
        rollout,
        slots={EVERYBODY: sum(rollout.slots.values())},
        empty={EVERYBODY: sum(rollout.empty.values())},
    )
