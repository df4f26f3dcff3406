"""The ledger's figures of a run: sums over its steps, and each step's own."""

import msgspec

from tlt.base.id_types import JobId, JobStatus, PolicyVersion, Step, WorkerId
from tlt.policies.run.run_state import Phase
from tlt.policies.speculation.savings_estimate import Savings, SavingsInterval
from tlt.protocol.refs import BlobRef
from tlt.protocol.shared_values import HubPolicy, UpdateMetrics
from tlt.report.acceptance import Acceptance, Positions
from tlt.report.batch_lengths_and_finish_times import LengthSummary, Rollout
from tlt.report.drafter_training import DrafterTraining
from tlt.report.evaluation_figures import EvalSummary


class StepSummary(msgspec.Struct, frozen=True, kw_only=True):
    step: Step
    reward: float
    rollouts: int
    dropped: int
    # answers that couldn't be scored: they were left out, or got the spec's fallback
    unscored: int
    # groups whose answers all had the same reward, so that the update trained on none of them
    uniform_groups: int
    # those that dynamic sampling replaced, the answers of the groups in their place, and these
    # answers' share of decode seconds
    replaced_groups: int = 0
    extra_answers: int = 0
    extra_share: float = 0.0
    # groups that it ended without
    waiting_groups: int = 0
    tokens: int
    length: LengthSummary
    # share of the answers that hit the token limit
    truncated: float
    # how often engines put an answer off for lack of memory, and read its tokens again
    retractions: int = 0
    rollout_seconds: float
    update_seconds: float | None = None
    metrics: UpdateMetrics | None = None
    # the mean of each of several rewards, by its name
    reward_parts: dict[str, float] = {}
    # of a mixture: the mean reward of each source's prompts, by its name
    reward_sources: dict[str, float] = {}


class StoredPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A policy whose weights are in the run's folder."""

    version: PolicyVersion
    weights: BlobRef
    adapter: BlobRef | None = None


class StepAccount(msgspec.Struct, frozen=True, kw_only=True):
    """The time of a step: each worker's seconds by duty add up to the step's seconds."""

    step: Step
    seconds: float
    device_seconds: float
    workers: dict[WorkerId, dict[str, float]]
    rollout: Rollout | None
    # saved by speculation: on all ranks together, and of the wait for the last answer
    savings: SavingsInterval | None
    wait_savings: SavingsInterval | None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    job: JobId | None
    status: JobStatus
    error: str | None
    # the checkpoint of another job that this one started from, as JOB@STEP
    starts_from: str | None = None
    # the commit that it began with, of a policy of the Hub
    hub_policy: HubPolicy | None = None
    phase: Phase
    step: Step
    steps_planned: int
    version: PolicyVersion
    # answers of the current rollout batch
    settled: int
    expected: int
    seconds: float
    phases: dict[str, float]
    # seconds of each worker by duty
    workers: dict[WorkerId, dict[str, float]]
    device_seconds: float
    losses: int
    accounts: tuple[StepAccount, ...]
    # None before the first control run
    savings: Savings | None
    # speculation was given up because it cost more than it saved
    gave_up: bool
    acceptance: tuple[Acceptance, ...]
    # shares of the speculative steps that accepted the first token, the first two, ...
    positions: tuple[float, ...]
    # the same for each drafter, oldest first
    by_drafter: tuple[Positions, ...]
    # share of the generated tokens that updates trained on
    trained_share: float
    # None if no drafter was trained
    drafter_training: DrafterTraining | None
    steps: tuple[StepSummary, ...]
    evals: tuple[EvalSummary, ...]
    last: StoredPolicy | None
    best: StoredPolicy | None
