"""Events say what happened, in the past tense: a closed union of frozen, tagged structs.

Deciders also take commands as events, by their own names: those of users, and of other deciders.
"""

from typing import TypeAlias

import msgspec

from tlt.base.id_types import (
    Attempt,
    Count,
    DrafterVersion,
    Epoch,
    Finite,
    Incarnation,
    JobName,
    Member,
    PathName,
    PolicyVersion,
    PromptIndex,
    Purpose,
    Step,
    StopReason,
    WorkerId,
)
from tlt.protocol.commands import (
    CancelJob,
    ContinueJob,
    EndJob,
    PauseJob,
    StartJob,
    SuspendJob,
    UserCommand,
)
from tlt.protocol.refs import (
    AcceptedCounts,
    AnswerRef,
    Checkpoint,
    DrafterBase,
    DrafterDelta,
    DrafterRef,
    PolicyRef,
    StartingCheckpoint,
)
from tlt.protocol.shared_values import (
    ChosenSizes,
    DrafterEvaluation,
    Prepared,
    StrategyTally,
    TokensByOrigin,
    UpdateMetrics,
    WorkerInfo,
)
from tlt.spec.config import JobSpec


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A fact that `decide` takes into account."""


class JobEvent(Event, frozen=True, kw_only=True):
    """An event of one job."""

    job: JobName


class WorkerEvent(JobEvent, frozen=True, kw_only=True):
    """An event that one incarnation of a worker reports about a job."""

    worker: WorkerId
    incarnation: Incarnation


class StepEvent(JobEvent, frozen=True, kw_only=True):
    """An event of one attempt at one step of a job."""

    epoch: Epoch
    step: Step
    attempt: Attempt


class WorkerStepEvent(StepEvent, frozen=True, kw_only=True):
    """An event that one incarnation of a worker reports about a step."""

    worker: WorkerId
    incarnation: Incarnation


class JobSubmitted(JobEvent, frozen=True, kw_only=True):
    """A user submitted a job."""

    spec: JobSpec
    # a folder of this job alone, kept when a later session resumes the job
    folder: PathName
    starts_from: StartingCheckpoint | None = None
    # of the waiting jobs, one of the highest priority runs next
    priority: int = 0


class JobPrepared(JobEvent, frozen=True, kw_only=True):
    """The data is read and tokenised, and the model folder is one that TLT runs."""

    prepared: Prepared


class JobRefused(JobEvent, frozen=True, kw_only=True):
    """A job can't run as its spec is written."""

    error: str


class SessionResumed(Event, frozen=True, kw_only=True):
    """A new coordinator took over; blobs in shared memory may be gone."""

    epoch: Epoch
    blobs_kept: bool


class WorkerJoined(Event, frozen=True, kw_only=True):
    """A worker started fresh ranks that wait for a job."""

    info: WorkerInfo


class WorkerLost(Event, frozen=True, kw_only=True):
    """An incarnation ended; `returning` says that its worker is already replacing the ranks."""

    worker: WorkerId
    incarnation: Incarnation
    reason: str
    returning: bool
    # True if it ended with its session, which doesn't count as a failure of the job
    with_session: bool = False


class WorkerReplaced(JobEvent, frozen=True, kw_only=True):
    """A worker that a job had lost is back, and another one has its place."""

    worker: WorkerId


class WorkerFailed(WorkerEvent, frozen=True, kw_only=True):
    """The ranks can't run a job as its spec is written; a retry would fail as well."""

    error: str


class SizesChosen(WorkerEvent, frozen=True, kw_only=True):
    """A rank with an engine has chosen the sizes that the spec leaves open."""

    rank: Count
    sizes: ChosenSizes
    why: str


class WorkerIdled(WorkerStepEvent, frozen=True, kw_only=True):
    """The queue is drained and all slots are empty; `requeues` echoes the last StartRollout."""

    purpose: Purpose
    requeues: Count


# --- rollouts


class RolloutFinished(WorkerStepEvent, frozen=True, kw_only=True):
    """A rank finished an answer, and wrote it to its file in the run's folder."""

    purpose: Purpose
    prompt: PromptIndex
    member: Member
    answer: AnswerRef
    # tokens
    length: Count
    accepted: tuple[AcceptedCounts, ...]
    # running requests when its last token was decoded
    batch: Count
    decode_seconds: Finite
    stop: StopReason
    # tokens of the prompt; 0 in journals that don't have it
    prompt_length: Count = 0
    # how often the engine put it off for lack of memory, and read its tokens again later
    retractions: Count = 0
    # seconds since the worker's last finished answer in which it wrote nothing, because all of its
    # answers waited for environments
    tool_seconds: Finite = 0.0


class RolloutCut(WorkerStepEvent, frozen=True, kw_only=True):
    """A rank gave up an unfinished answer, and wrote its tokens so far to its file."""

    purpose: Purpose
    prompt: PromptIndex
    member: Member
    # None without tokens
    answer: AnswerRef | None
    decode_seconds: Finite
    # attempts that don't count as tries, this one left out
    excused: Count


class RolloutDropped(StepEvent, frozen=True, kw_only=True):
    """An answer was given up."""

    purpose: Purpose
    prompt: PromptIndex
    member: Member
    reason: str


class RolloutScored(StepEvent, frozen=True, kw_only=True, omit_defaults=True):
    """An answer has its reward, or None if it is left out."""

    purpose: Purpose
    prompt: PromptIndex
    member: Member
    length: Count
    reward: Finite | None
    # why scoring failed: the function raised, returned NaN or took too long
    error: str | None = None
    # of several rewards: what each gave, in the order of the spec
    parts: tuple[Finite | None, ...] = ()
    # of a held-out answer: what it says in the end, if a built-in verifier extracts that
    final: str | None = None
    # it is right; None if it is left out, and in journals that don't have it
    correct: bool | None = None
    # the reward before the penalty for its length, where that took some of it
    unpenalised: Finite | None = None
    # what its prompt's row names as its source, if rows do
    source: str | None = None
    # what its environment has measured, by name
    measured: dict[str, Finite] = {}


class DecodingReported(WorkerEvent, frozen=True, kw_only=True):
    """A rank reports its decoding since its last report, at most once a second."""

    rank: Count
    # counts this rank's reports on the job
    serial: Count
    step: Step
    purpose: Purpose
    tallies: tuple[StrategyTally, ...]


# --- drafter training


class DrafterRefused(WorkerEvent, frozen=True, kw_only=True):
    """A rank can't use a drafter; the rollout goes on without it."""

    version: DrafterVersion
    error: str


class DrafterDeltaReady(JobEvent, frozen=True, kw_only=True):
    """A member published the work of its last micro-batches."""

    training_session: Count
    policy: PolicyVersion
    delta: DrafterDelta
    # the counts and seconds that follow are those since the member's last delta
    updates: Count
    tokens: TokensByOrigin
    # seconds of the micro-batches that were kept
    seconds: Finite
    # seconds of prefills of answers whose hidden states weren't on the host
    reading_seconds: Finite
    publishing_seconds: Finite
    # duration of one micro-batch: the median and the longest
    median_seconds: Finite
    longest_seconds: Finite
    loss: Finite


class DrafterTrainingStopped(WorkerEvent, frozen=True, kw_only=True):
    """A worker stopped training: it was commanded to, or has no answers to learn from."""

    training_session: Count
    # from the command until the last rank had stopped, as the worker measures it
    seconds: Finite = 0.0
    # seconds of the micro-batches that were dropped
    dropped_seconds: Finite
    # median duration of a micro-batch
    median_seconds: Finite


class DrafterMerged(WorkerEvent, frozen=True, kw_only=True):
    """Deltas were merged into a new base, and the drafter in it was evaluated."""

    base: DrafterBase
    drafter: DrafterRef
    evaluation: DrafterEvaluation
    seconds: Finite


class DrafterDiverged(WorkerEvent, frozen=True, kw_only=True):
    """A drafter diverged or can't be read, so the training since the last good one is void."""

    training_session: Count
    # the base that the member was commanded to train
    base: DrafterVersion
    error: str


class DrafterCommitFailed(JobEvent, frozen=True, kw_only=True):
    """An adopted drafter could not be committed to the run's folder."""

    version: DrafterVersion
    error: str


# --- policy updates


class PolicyUpdateFinished(WorkerStepEvent, frozen=True, kw_only=True):
    """All ranks of a worker hold the next policy."""

    version: PolicyVersion


class PolicyPublished(StepEvent, frozen=True, kw_only=True):
    """The weights of the next policy can be loaded."""

    policy: PolicyRef
    metrics: UpdateMetrics | None


class CheckpointCommitted(StepEvent, frozen=True, kw_only=True):
    """Policy and optimiser were committed to the run's folder."""

    checkpoint: Checkpoint


SessionEvent: TypeAlias = (
    JobSubmitted
    | UserCommand
    | SuspendJob
    | JobPrepared
    | JobRefused
    | EndJob
    | SessionResumed
    | WorkerJoined
    | WorkerLost
)

# Events that a rank reports to its worker, which reports DrafterTrainingStopped and
# PolicyUpdateFinished once for all of its ranks.
RankEvent: TypeAlias = (
    WorkerFailed
    | SizesChosen
    | PauseJob
    | RolloutFinished
    | RolloutCut
    | DecodingReported
    | DrafterRefused
    | DrafterDeltaReady
    | DrafterTrainingStopped
    | DrafterMerged
    | DrafterDiverged
    | PolicyUpdateFinished
    | PolicyPublished
    | CheckpointCommitted
)

RunEvent: TypeAlias = (
    StartJob
    | CancelJob
    | ContinueJob
    | SessionResumed
    | WorkerJoined
    | WorkerLost
    | WorkerReplaced
    | WorkerIdled
    | RolloutDropped
    | RolloutScored
    | DrafterCommitFailed
    | RankEvent
)

AnyEvent: TypeAlias = SessionEvent | RunEvent
