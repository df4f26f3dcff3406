"""Fold a run's journal: what its time was spent on, what it trained, what speculation saved.

The ledger drives `decide` over the journal's events and watches the state: seconds by duty and by
phase are what the coordinator itself believed, and events that it ignored are not counted.
"""

from typing import cast

import msgspec

from tlt.base.id_types import JobId, JobStatus, Step
from tlt.policies.algorithm.sample_sharding import count_teaching_groups
from tlt.policies.run import coordinator
from tlt.policies.run.evaluation_answers import PromptMeans, prompt_means
from tlt.policies.run.run_state import Phase, RunState, batch_with
from tlt.policies.speculation import savings_estimate
from tlt.protocol.commands import (
    Command,
    CommitBestPolicy,
    EndJob,
    IssuePrompts,
    RecordRolloutBatch,
    StartJob,
)
from tlt.protocol.events import (
    AnyEvent,
    DecodingReported,
    PolicyPublished,
    RolloutCut,
    RolloutDropped,
    RolloutFinished,
    RolloutScored,
    RunEvent,
)
from tlt.protocol.refs import PolicyRef
from tlt.protocol.shared_values import HubPolicy
from tlt.report.acceptance import AcceptedTokens
from tlt.report.batch_lengths_and_finish_times import BatchAnswers, LengthSummary, Rollout
from tlt.report.drafter_training import DrafterTrainingFold
from tlt.report.duties import ALL_WORKERS
from tlt.report.evaluation_figures import EvalSummary, gain_over, overall, set_figures
from tlt.report.ledger_figure_types import (
    Snapshot,
    StepAccount,
    StepSummary,
    StoredPolicy,
)
from tlt.report.statistics import mean
from tlt.report.step_savings import StepSavings
from tlt.report.time_by_duty import FIRST_STEP, TimeByDuty
from tlt.report.transition import Transition
from tlt.spec.config import JobSpec
from tlt.spec.reward import EXTRACTING


class Ledger:
    """Feed it a journal's entries in order.

    With `by_worker=False` it sums the accounts of finished steps over their workers.
    """

    def __init__(self, job: JobId, spec: JobSpec, by_worker: bool = True) -> None:
        # once the job has started, with the folder of a policy of the Hub
        self.spec = spec
        self._by_worker = by_worker
        self._state = coordinator.new_run(job, spec)
        # when the job started; None before that
        self.began: float | None = None
        # the checkpoint of another job that it started from
        self.starts_from: str | None = None
        # None if the spec names a folder
        self.hub_policy: HubPolicy | None = None
        self._now = 0.0
        # seconds not charged yet: most entries change no duty, and every charge visits all workers
        self._uncharged = 0.0
        self._status: JobStatus = "running"
        self._error: str | None = None
        self._time = TimeByDuty(by_worker)
        self._savings = StepSavings()
        self._accepted = AcceptedTokens()
        self.drafter_training = DrafterTrainingFold()
        # the answers of the current rollout batch, or of the last one
        self.batch = BatchAnswers(0.0)
        # by step: those of training batches that haven't begun yet
        self._ahead: dict[Step, BatchAnswers] = {}
        self._rollouts: dict[Step, Rollout] = {}
        # tokens of training rollouts, and those that updates trained on
        self._generated_tokens = 0
        self._trained_tokens = 0
        self._update_began = 0.0
        self.steps: list[StepSummary] = []
        self.evals: list[EvalSummary] = []
        self._first_means: PromptMeans | None = None
        self._extracts = any(reward.kind in EXTRACTING for reward in spec.rewards)
        self._best: StoredPolicy | None = None

    @property
    def ended(self) -> bool:
        return self._state.phase is Phase.ENDED

    @property
    def state(self) -> RunState:
        """Return what the coordinator believes after the last entry."""
        return self._state

    def add(self, event: AnyEvent, at: float) -> Transition:
        """Add the journal's next entry and return what it changed."""
        before = self._state
        if isinstance(event, StartJob):
            self.began = self._now = at
            self.starts_from = None if event.starts_from is None else event.starts_from.name
            self.spec, self.hub_policy = event.spec, event.prepared.hub_policy
        self._pass_time(before, at)
        # The journal holds only events that this job's `decide` consumed.
        self._state, commands = coordinator.decide(before, cast("RunEvent", event), at)
        after = self._state
        transition = Transition(
            before=before, event=event, after=after, commands=tuple(commands), at=at
        )
        waited = event.tool_seconds if isinstance(event, RolloutFinished) else 0.0
        if waited or _changes_time_use(before, after):
            self._charge(before)
        if after.batch is not before.batch:
            self.batch.add(event, self._now, self._uncharged)
        elif after.ahead is not before.ahead:
            self._add_ahead(event)
        self.drafter_training.add(transition)
        if transition.counts:
            self._add_event(event)
        for command in commands:
            self._add_command(command, before)
        if after.batch is not None and after.batch.purpose == "train":
            self._begin_step(after.batch.step)
        if isinstance(event, PolicyPublished) and transition.counts:
            self._finish_update(event)
        return transition

    def snapshot(self, since: Step = FIRST_STEP) -> Snapshot:
        """Return all figures, with the accounts of the steps from `since` on."""
        state = self._state
        self._charge(state)
        expected = unsettled = 0
        if state.batch is not None:
            expected = sum(len(group.members) for group in state.batch.groups.values())
            unsettled = state.batch.unsettled
        last = state.policy.checkpoint
        return Snapshot(
            job=state.job,
            status=self._status,
            error=self._error,
            starts_from=self.starts_from,
            hub_policy=self.hub_policy,
            phase=state.phase,
            step=state.step,
            steps_planned=state.spec.algorithm.steps,
            version=state.policy.version,
            settled=expected - unsettled,
            expected=expected,
            seconds=0.0 if self.began is None else self._now - self.began,
            phases=dict(self._time.phases),
            workers=self._time.workers(),
            device_seconds=self._time.device_seconds,
            losses=state.losses,
            accounts=self._accounts(since),
            savings=savings_estimate.estimate_savings(state.decoding, self._open_seconds()),
            gave_up=not state.speculation_allowed,
            acceptance=self._accepted.table(),
            positions=self._accepted.positions(),
            by_drafter=self._accepted.by_drafter(),
            trained_share=self._trained_tokens / max(1, self._generated_tokens),
            drafter_training=self.drafter_training.summary(),
            steps=tuple(self.steps),
            evals=tuple(self.evals),
            last=None if last is None else _stored(last.policy),
            best=self._best,
        )

    def _accounts(self, since: Step) -> tuple[StepAccount, ...]:
        plain = savings_estimate.plain_step_costs(self._state.decoding)
        accounts: list[StepAccount] = []
        for step, time in self._time.steps(since):
            saved, critical = self._savings.of(step, plain)
            accounts.append(
                StepAccount(
                    step=step,
                    seconds=time.seconds,
                    device_seconds=time.device_seconds,
                    workers={worker: dict(duties) for worker, duties in time.workers.items()},
                    rollout=self._rollouts.get(step),
                    savings=saved,
                    wait_savings=critical,
                )
            )
        return tuple(accounts)

    def _pass_time(self, state: RunState, at: float) -> None:
        if state.phase not in (Phase.STARTING, Phase.ENDED):
            self._uncharged += max(0.0, at - self._now)
            self._now = max(self._now, at)

    def _charge(self, state: RunState) -> None:
        """Charge the time since the last charge to the duties and the phase of `state`."""
        passed, self._uncharged = self._uncharged, 0.0
        if state.phase in (Phase.STARTING, Phase.ENDED):
            return
        self._time.pass_time(state, passed)
        self.drafter_training.pass_time(state, passed)
        if state.batch is not None:
            self.batch.pass_time(state, passed)

    def _add_event(self, event: AnyEvent) -> None:
        match event:
            case RolloutFinished():
                self._accepted.add_answer(event.accepted)
                if event.tool_seconds:
                    self._time.wait_for_tools(event.worker, event.tool_seconds)
                if event.purpose == "train":
                    self._savings.finish_answer(self._state.step, event.worker)
            case RolloutCut() if self.steps and not _is_open(self._state, event):
                self._add_cut(event)
            case DecodingReported():
                self._savings.add(event)
                self._accepted.add_tallies(event.tallies)
            case _:
                pass

    def _add_ahead(self, event: AnyEvent) -> None:
        """Add an event to the answers of the next step."""
        if isinstance(event, RolloutFinished | RolloutCut | RolloutScored | RolloutDropped):
            self._ahead[event.step].add(event, self._now, self._uncharged)
        if isinstance(event, RolloutFinished | RolloutCut) and self._state.phase is Phase.ROLLOUT:
            self.batch.use_slot(event)

    def _begin_step(self, step: Step) -> None:
        if (answers := self._ahead.pop(step, None)) is not None:
            self.batch = answers
            self.batch.begin(self._now)

    def _add_cut(self, event: RolloutCut) -> None:
        """Count the slot of an answer as used that was cut when its step ended."""
        step = self.steps[-1].step
        rollout, worker = self._rollouts[step], event.worker if self._by_worker else ALL_WORKERS
        empty = rollout.empty_slot_seconds.get(worker, 0.0) - event.decode_seconds
        self._rollouts[step] = msgspec.structs.replace(
            rollout, empty_slot_seconds={**rollout.empty_slot_seconds, worker: max(0.0, empty)}
        )

    def _add_command(self, command: Command, before: RunState) -> None:
        match command:
            case IssuePrompts(replaces=None, purpose="eval"):
                self.batch = BatchAnswers(self._now)
            case IssuePrompts(replaces=None):
                self._ahead[command.step] = BatchAnswers(self._now)
            case IssuePrompts():
                self._begin_step(command.step)
                self.batch.extra_prompts.update(command.prompts)
            case RecordRolloutBatch():
                if command.purpose == "train":
                    self._begin_step(command.step)
                self._close_batch(command, before)
            case CommitBestPolicy():
                self._best = _stored(command.policy)
            case EndJob():
                self._status, self._error = command.status, command.error
            case _:
                pass

    def _close_batch(self, command: RecordRolloutBatch, before: RunState) -> None:
        if before.speculation_allowed:
            newest = self._state.decoding.newest
            self._savings.close_batch(command.step, command.purpose, newest)
        if command.purpose == "eval":
            self.evals.append(self._eval_summary(command))
        else:
            self._finish_batch(command)
            self._update_began = self._now

    def _open_seconds(self) -> float:
        batch = self._state.batch
        return 0.0 if batch is None else batch.decode_work

    def _eval_summary(self, record: RecordRolloutBatch) -> EvalSummary:
        means = prompt_means(record.sets)
        gain = None if self._first_means is None else gain_over(self._first_means, means)
        self._first_means = self._first_means or means
        sets = tuple(set_figures(each, extracts=self._extracts) for each in record.sets)
        score, stderr = overall(sets, means)
        return EvalSummary(
            step=record.step,
            version=record.version,
            mean=score,
            stderr=stderr,
            problems=sum(each.problems for each in sets),
            length=LengthSummary.of(self.batch.lengths),
            seconds=self._now - self.batch.began,
            reward_parts=record.parts,
            sets=sets,
            gain=gain,
        )

    def _finish_batch(self, record: RecordRolloutBatch) -> None:
        batch, plan = self.batch, self._state.policy.plans.get(record.version)
        samples = () if plan is None else plan.samples
        trained_tokens, tokens = sum(sample.length for sample in samples), sum(batch.lengths)
        rollout = batch.rollout(trained_tokens)
        self._rollouts[record.step] = rollout if self._by_worker else _sum_workers(rollout)
        self._trained_tokens += trained_tokens
        self._generated_tokens += tokens
        groups = self.spec.algorithm.prompts_per_step + len(batch.extra_prompts)
        trained_groups = count_teaching_groups(samples)
        self.steps.append(
            StepSummary(
                step=record.step,
                reward=mean(record.rewards),
                reward_parts=record.parts,
                reward_sources=record.sources,
                rollouts=len(record.rewards),
                dropped=batch.dropped,
                unscored=batch.unscored,
                # more may be complete by the time that a lost policy is restored
                uniform_groups=max(0, groups - trained_groups),
                replaced_groups=len(batch.extra_prompts),
                extra_answers=batch.extra_answers,
                extra_share=batch.extra_share,
                waiting_groups=self._state.waiting_groups,
                tokens=tokens,
                length=LengthSummary.of(batch.lengths),
                truncated=batch.truncated / max(1, len(batch.lengths)),
                retractions=batch.retractions,
                rollout_seconds=self._now - batch.began,
            )
        )

    def _finish_update(self, event: PolicyPublished) -> None:
        self.steps[-1] = msgspec.structs.replace(
            self.steps[-1], update_seconds=self._now - self._update_began, metrics=event.metrics
        )


def _changes_time_use(before: RunState, after: RunState) -> bool:
    """Return True if time counts differently from now on: for another step, phase or duty."""
    if (
        after.phase is not before.phase
        or after.step != before.step
        or after.newest_incarnations is not before.newest_incarnations
        or (after.batch is None) is not (before.batch is None)
        or len(after.workers) != len(before.workers)
    ):
        return True
    if after.workers is before.workers:
        return False
    return any(
        (old := before.workers.get(worker)) is None
        or old.duty is not known.duty
        or old.info is not known.info
        or old.ahead is not known.ahead
        for worker, known in after.workers.items()
    )


def _is_open(state: RunState, event: RolloutCut) -> bool:
    """Return True for an answer that was cut while its batch or the one before it is open."""
    return state.batch is not None and batch_with(state, event) is not None


def _stored(policy: PolicyRef) -> StoredPolicy | None:
    if policy.weights is None:
        return None
    return StoredPolicy(version=policy.version, weights=policy.weights, adapter=policy.adapter)


def _sum_workers(rollout: Rollout) -> Rollout:
    return msgspec.structs.replace(
        rollout,
        slot_seconds={ALL_WORKERS: sum(rollout.slot_seconds.values())},
        empty_slot_seconds={ALL_WORKERS: sum(rollout.empty_slot_seconds.values())},
    )
