"""What is told of a run: sums over its steps, and each step's own."""

from typing import Literal

import msgspec

from tlt.ids import DrafterVersion, JobId, JobStatus, PolicyVersion, Step, WorkerId
from tlt.policies.job.run_state import Phase
from tlt.policies.speculation.savings_estimate import Savings, SavingsInterval
from tlt.protocol.records import Joules, UpdateMetrics
from tlt.protocol.refs import BlobRef
from tlt.report.drafter_training import Drafting


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    mean: float = 0.0
    p50: int = 0
    p90: int = 0
    max: int = 0


class StepSummary(msgspec.Struct, frozen=True, kw_only=True):
    step: Step
    reward: float
    rollouts: int
    dropped: int
    # reward errors that were scored with the fallback
    unscored: int
    # prompts whose answers all scored the same: nothing was learned from them
    agreed: int
    tokens: int
    length: Spread
    # the share of answers that ran out of room
    clipped: float
    rollout_seconds: float
    learn_seconds: float | None = None
    metrics: UpdateMetrics | None = None


class EvalSummary(msgspec.Struct, frozen=True, kw_only=True):
    step: Step
    version: PolicyVersion
    mean: float
    stderr: float
    problems: int
    length: Spread
    seconds: float


class StoredPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A policy whose weights lie in the run's folder."""

    version: PolicyVersion
    weights: BlobRef


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """How the training rollouts of a step came in."""

    # seconds after the first prompt was issued at which so many of 100 were done
    done_50: float
    done_90: float
    done_99: float
    # slot-seconds of each worker, until the last answer was there: those there were, those not used
    slots: dict[WorkerId, float]
    empty: dict[WorkerId, float]
    # of the tokens, those that the update learned from
    trained: float


class StepAccount(msgspec.Struct, frozen=True, kw_only=True):
    """Where a step's time went: each worker's seconds add up to those that passed."""

    step: Step
    seconds: float
    device_seconds: float
    workers: dict[WorkerId, dict[str, float]]
    # until its update was made, since that of the step before was
    joules: Joules | None
    rollout: Rollout | None
    # by speculation: on all ranks together, and of the time until the last answer was there
    saved: SavingsInterval | None
    critical: SavingsInterval | None


class Acceptance(msgspec.Struct, frozen=True, kw_only=True):
    """What rounds in which something was to be guessed came to."""

    by: Literal["drafter", "ngram"]
    drafter: DrafterVersion | None
    bucket: int
    rounds: int
    # running rows, summed over the rounds
    rows: int
    tokens: int


class Positions(msgspec.Struct, frozen=True, kw_only=True):
    """Of the rounds that one drafter guessed in, those that accepted one guess, two, ..."""

    # None: n-grams, or an engine that does not say which
    drafter: DrafterVersion | None
    rounds: int
    shares: tuple[float, ...]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    job: JobId | None
    status: JobStatus
    error: str | None
    phase: Phase
    step: Step
    steps_planned: int
    version: PolicyVersion
    # of the round in hand
    settled: int
    expected: int
    seconds: float
    phases: dict[str, float]
    # of each, by duty; away: lost, or not yet back
    workers: dict[WorkerId, dict[str, float]]
    device_seconds: float
    # until the last update was made
    joules: Joules | None
    losses: int
    accounts: tuple[StepAccount, ...]
    # None without a control run
    saved: Savings | None
    # speculation was given up because it cost more than it saved
    gave_up: bool
    acceptance: tuple[Acceptance, ...]
    # of the rounds that drafted, the share that accepted the first draft, the first two, ...
    positions: tuple[float, ...]
    # the same of each drafter, the oldest first
    by_drafter: tuple[Positions, ...]
    # of the generated tokens, those that were learned from
    trained: float
    # None where no drafter was trained
    drafting: Drafting | None
    steps: tuple[StepSummary, ...]
    evals: tuple[EvalSummary, ...]
    last: StoredPolicy | None
    best: StoredPolicy | None
