"""Events: what happened, in the past tense. A closed union of frozen, tagged structs."""

from typing import TypeAlias

import msgspec

from tlt.config import JobSpec
from tlt.ids import (
    Attempt,
    DrafterVersion,
    Epoch,
    Incarnation,
    JobId,
    JobStatus,
    Member,
    PolicyVersion,
    PromptIndex,
    Purpose,
    Step,
    StopReason,
    WorkerId,
)
from tlt.protocol.records import (
    DrafterEvaluation,
    Joules,
    StrategyTally,
    TokensByOrigin,
    UpdateMetrics,
    WorkerInfo,
)
from tlt.protocol.refs import (
    BatchSpan,
    Checkpoint,
    DrafterBase,
    DrafterDelta,
    DrafterRef,
    DrafterSpan,
    OriginSpan,
    PolicyRef,
    PolicySpan,
    Tensor,
)


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Something that happened."""


class JobEvent(Event, frozen=True, kw_only=True):
    job: JobId
    epoch: Epoch
    step: Step
    attempt: Attempt


class JobSubmitted(Event, frozen=True, kw_only=True):
    job: JobId
    spec: JobSpec
    # the run's own, wherever later sessions put theirs
    folder: str


class JobCancelRequested(Event, frozen=True, kw_only=True):
    job: JobId


class JobPrepared(Event, frozen=True, kw_only=True):
    """The data was read and tokenised; the model folder is one that we run."""

    job: JobId
    train_prompts: int
    eval_prompts: int


class JobRefused(Event, frozen=True, kw_only=True):
    job: JobId
    error: str


class SessionResumed(Event, frozen=True, kw_only=True):
    """A coordinator took over; what lay in shared memory may be gone."""

    epoch: Epoch
    blobs_kept: bool


class WorkerJoined(Event, frozen=True, kw_only=True):
    info: WorkerInfo


class WorkerLost(Event, frozen=True, kw_only=True):
    """This incarnation is over; `returning` says that its worker is already replacing the ranks."""

    worker: WorkerId
    incarnation: Incarnation
    reason: str
    returning: bool
    # it went down with its session, which is no failure of the job's
    with_session: bool = False


class WorkerFailed(Event, frozen=True, kw_only=True):
    """The ranks refused a job in a way that trying again won't mend."""

    job: JobId
    worker: WorkerId
    incarnation: Incarnation
    error: str


class JobStarted(Event, frozen=True, kw_only=True):
    job: JobId
    epoch: Epoch
    spec: JobSpec
    folder: str
    train_prompts: int
    eval_prompts: int
    workers: tuple[WorkerInfo, ...]


class JobEnded(Event, frozen=True, kw_only=True):
    job: JobId
    status: JobStatus
    error: str | None


class RolloutFinished(JobEvent, frozen=True, kw_only=True):
    """A whole answer, and where each of its tokens came from."""

    worker: WorkerId
    incarnation: Incarnation
    purpose: Purpose
    prompt: PromptIndex
    member: Member
    prompt_tokens: tuple[int, ...]
    tokens: Tensor
    # of the sampled token, after temperature and before filters
    logprobs: Tensor
    text: str
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    policies: tuple[PolicySpan, ...]
    drafters: tuple[DrafterSpan, ...]
    origins: tuple[OriginSpan, ...]
    batches: tuple[BatchSpan, ...]
    decode_seconds: float
    stop: StopReason

    @property
    def length(self) -> int:
        return self.tokens.shape[0]


class RolloutDropped(JobEvent, frozen=True, kw_only=True):
    purpose: Purpose
    prompt: PromptIndex
    member: Member
    reason: str


class RolloutScored(JobEvent, frozen=True, kw_only=True):
    purpose: Purpose
    prompt: PromptIndex
    member: Member
    length: int
    reward: float
    # why the reward is the configured fallback: the function raised, returned NaN or took too long
    error: str | None = None


class WorkerIdled(JobEvent, frozen=True, kw_only=True):
    """Queue drained and slots empty; `requeues` echoes the last StartRollout."""

    worker: WorkerId
    incarnation: Incarnation
    purpose: Purpose
    requeues: int


class PolicyUpdateFinished(JobEvent, frozen=True, kw_only=True):
    worker: WorkerId
    incarnation: Incarnation
    version: PolicyVersion
    seconds: float
    # since the worker opened the job
    joules: Joules | None = None


class DecodingReported(Event, frozen=True, kw_only=True):
    """How a rank decoded since it last said so: at most once a second, while it decodes."""

    job: JobId
    worker: WorkerId
    incarnation: Incarnation
    rank: int
    # counts what this rank has said of the job
    serial: int
    # what it decoded for
    step: Step
    purpose: Purpose
    tallies: tuple[StrategyTally, ...]


class DrafterRefused(Event, frozen=True, kw_only=True):
    """The rollout goes on without it."""

    job: JobId
    worker: WorkerId
    incarnation: Incarnation
    error: str
    # None in journals of earlier releases
    version: DrafterVersion | None = None


class DrafterCommitFailed(Event, frozen=True, kw_only=True):
    """One that was adopted could not be committed to the run's folder."""

    job: JobId
    version: DrafterVersion
    error: str


class SpeculationStopped(Event, frozen=True, kw_only=True):
    """The worker's ranks decode without it from now on, as they were told."""

    job: JobId
    worker: WorkerId
    incarnation: Incarnation


class DrafterDeltaReady(Event, frozen=True, kw_only=True):
    """Some micro-batches of one member: every few of them, and when it leaves."""

    job: JobId
    training_session: int
    policy: PolicyVersion
    delta: DrafterDelta
    # since it last said so
    updates: int
    tokens: TokensByOrigin
    # in micro-batches that were kept; in reading what others wrote; in publishing
    seconds: float
    reading_seconds: float
    publishing_seconds: float
    # of one micro-batch: the median and the longest
    typical_seconds: float
    longest_seconds: float
    loss: float


class DrafterTrainingStopped(Event, frozen=True, kw_only=True):
    """A worker trains no more: it was told so, or has nothing to learn from."""

    job: JobId
    worker: WorkerId
    incarnation: Incarnation
    training_session: int
    # from the command's arrival at the slowest rank until that had stopped
    seconds: float
    # in micro-batches that were dropped
    dropped_seconds: float
    # of a micro-batch
    typical_seconds: float


class DrafterMerged(Event, frozen=True, kw_only=True):
    """Deltas were merged into a new trunk, and the drafter in it was measured."""

    job: JobId
    worker: WorkerId
    incarnation: Incarnation
    base: DrafterBase
    drafter: DrafterRef
    evaluation: DrafterEvaluation
    seconds: float


class DrafterDiverged(Event, frozen=True, kw_only=True):
    """What was trained since the last good drafter is void: it diverged, or cannot be read."""

    job: JobId
    worker: WorkerId
    incarnation: Incarnation
    training_session: int
    # that it was told to train
    base: DrafterVersion
    error: str


class PolicyPublished(JobEvent, frozen=True, kw_only=True):
    policy: PolicyRef
    metrics: UpdateMetrics | None


class CheckpointCommitted(JobEvent, frozen=True, kw_only=True):
    checkpoint: Checkpoint


SessionEvent: TypeAlias = (
    JobSubmitted
    | JobCancelRequested
    | JobPrepared
    | JobRefused
    | JobEnded
    | SessionResumed
    | WorkerJoined
    | WorkerLost
)

RunEvent: TypeAlias = (
    JobStarted
    | JobCancelRequested
    | SessionResumed
    | WorkerJoined
    | WorkerLost
    | WorkerFailed
    | RolloutFinished
    | RolloutDropped
    | RolloutScored
    | WorkerIdled
    | DecodingReported
    | SpeculationStopped
    | DrafterRefused
    | DrafterDeltaReady
    | DrafterTrainingStopped
    | DrafterMerged
    | DrafterDiverged
    | DrafterCommitFailed
    | PolicyUpdateFinished
    | PolicyPublished
    | CheckpointCommitted
)

AnyEvent: TypeAlias = SessionEvent | RunEvent
