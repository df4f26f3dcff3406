"""Everything that travels: events (past tense) say what was, commands (imperative) what to do.

Both are closed unions of frozen, tagged structs; whoever receives one matches all of it.
"""

from typing import TypeAlias

import msgspec

from tlt.config import JobSpec
from tlt.strategies import Strategy
from tlt.types import (
    Attempt,
    Digest,
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

SCHEMA_VERSION = 1


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message."""


class BlobRef(Value, frozen=True, kw_only=True):
    """A content-addressed file: its digest is its name."""

    digest: Digest
    bytes: int


class Tensor(Value, frozen=True, kw_only=True):
    """Small tensors are inline, larger ones are a blob."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | None = None
    blob: BlobRef | None = None


class PolicySpan(Value, frozen=True, kw_only=True, array_like=True):
    """`tokens` consecutive tokens were drawn from this policy version."""

    version: PolicyVersion
    tokens: int


class DrafterSpan(Value, frozen=True, kw_only=True, array_like=True):
    version: DrafterVersion | None
    tokens: int


class OriginSpan(Value, frozen=True, kw_only=True, array_like=True):
    """How consecutive tokens came about: 'plain', 'accepted' (a draft) or 'corrected'."""

    origin: str
    tokens: int


class BatchSpan(Value, frozen=True, kw_only=True, array_like=True):
    """`tokens` consecutive tokens were decoded in a running batch of `size`."""

    size: int
    tokens: int


class ControlRuns(Value, frozen=True, kw_only=True, array_like=True):
    """Of each run: tokens and seconds, squared and multiplied, summed over the runs."""

    count: int
    tokens_squared: float
    seconds_squared: float
    product: float


class StrategyTally(Value, frozen=True, kw_only=True):
    """What decoding in one way came to, over some rounds of one bucket of batch sizes."""

    strategy: Strategy
    # the largest batch size in it
    bucket: int
    # that was asked
    drafter: DrafterVersion | None
    # where nothing was guessed so that others can be compared with it: runs that are over
    control: ControlRuns | None
    rounds: int
    # rounds in which it was tried rather than thought best
    tried: int
    # running rows, summed over the rounds
    rows: int
    tokens: int
    seconds: float
    # tokens that were expected of it
    expected: float


class WorkerInfo(Value, frozen=True, kw_only=True):
    worker: WorkerId
    incarnation: Incarnation
    ranks: int
    host: str
    # host:port where this worker's first rank serves a torch.distributed store
    rendezvous: str


class PolicyRef(Value, frozen=True, kw_only=True):
    """A version of the policy's weights; version 0 is the folder that the spec names."""

    version: PolicyVersion
    weights: BlobRef | None


class Checkpoint(Value, frozen=True, kw_only=True):
    """Files that lie in the run's folder: policy and optimiser as of one version."""

    version: PolicyVersion
    weights: BlobRef
    optimiser: BlobRef


class SampleRef(Value, frozen=True, kw_only=True, array_like=True):
    prompt: PromptIndex
    member: Member
    advantage: float


class MinibatchShare(Value, frozen=True, kw_only=True):
    """What the ranks of one worker do in one optimiser step, and the totals over all workers."""

    ranks: tuple[tuple[SampleRef, ...], ...]
    total_tokens: int
    total_sequences: int


class Heartbeat(Value, frozen=True, kw_only=True):
    """A worker's pulse: whoever watches it compares counters, never clocks."""

    incarnation: Incarnation
    counter: int
    # of the rank that has done the least since its last command; stands still when it is stuck
    progress: int
    running: int
    pid: int
    rank_pids: tuple[int, ...]
    job: JobId | None


class JobRecord(Value, frozen=True, kw_only=True):
    """What `tlt jobs` shows of a job."""

    job: JobId
    status: JobStatus
    error: str | None
    submitted: float
    folder: str
    spec: JobSpec


# --- entries of the prompts stream -------------------------------------------------------------


class PromptIssued(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    job: JobId
    epoch: Epoch
    step: Step
    attempt: Attempt
    purpose: Purpose
    prompt: PromptIndex
    member: Member
    tokens: tuple[int, ...]


# --- events ------------------------------------------------------------------------------------


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


class LearnFinished(JobEvent, frozen=True, kw_only=True):
    worker: WorkerId
    incarnation: Incarnation
    version: PolicyVersion
    seconds: float


class StrategyChosen(Event, frozen=True, kw_only=True):
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


class SpeculationStopped(Event, frozen=True, kw_only=True):
    """The worker's ranks decode without it from now on, as they were told."""

    job: JobId
    worker: WorkerId
    incarnation: Incarnation


class UpdateMetrics(Value, frozen=True, kw_only=True):
    """Means over the samples of one update."""

    loss: float
    gradient_norm: float
    learning_rate: float
    entropy: float
    clipped_low: float
    clipped_high: float
    # k3 estimate between the policy and the one that sampled
    sampling_kl: float
    reference_kl: float | None
    importance_truncated: float
    tokens: int
    samples: int


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
    | StrategyChosen
    | SpeculationStopped
    | DrafterRefused
    | LearnFinished
    | PolicyPublished
    | CheckpointCommitted
)
AnyEvent: TypeAlias = SessionEvent | RunEvent


# --- commands ----------------------------------------------------------------------------------


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Something to do."""


class ToWorker(Command, frozen=True, kw_only=True):
    worker: WorkerId
    incarnation: Incarnation


class OpenJob(ToWorker, frozen=True, kw_only=True):
    job: JobId
    epoch: Epoch
    spec: JobSpec
    folder: str


class CloseJob(ToWorker, frozen=True, kw_only=True):
    """Drop what is running, forget the job."""

    job: JobId


class StartRollout(ToWorker, frozen=True, kw_only=True):
    job: JobId
    epoch: Epoch
    step: Step
    purpose: Purpose
    policy: PolicyRef
    requeues: int


class StopSpeculation(ToWorker, frozen=True, kw_only=True):
    """For the rest of the job."""

    job: JobId


class Learn(ToWorker, frozen=True, kw_only=True):
    """Bring the trainer from `version` to `version + 1`, with all ranks of all workers."""

    job: JobId
    epoch: Epoch
    step: Step
    attempt: Attempt
    version: PolicyVersion
    rendezvous: str
    group: str
    world: int
    first_rank: int
    # everybody loads this first; None: go on with what is held
    restore: Checkpoint | None
    # this global rank's state is broadcast first, because some member holds an older one
    sync_from: int | None
    minibatches: tuple[MinibatchShare, ...]
    # the first rank commits policy and optimiser to the run's folder afterwards
    checkpoint: bool


class ReplaceRanks(ToWorker, frozen=True, kw_only=True):
    """A collective failed: whatever the ranks hold is void, start fresh ones."""

    reason: str


class IssuePrompts(Command, frozen=True, kw_only=True):
    job: JobId
    epoch: Epoch
    step: Step
    purpose: Purpose
    prompts: tuple[PromptIndex, ...]
    members: int


class RequeuePrompts(Command, frozen=True, kw_only=True):
    """What this incarnation held goes back to the queue."""

    job: JobId
    incarnation: Incarnation


class KeepRollout(Command, frozen=True, kw_only=True):
    """The answer in the event at hand counts: keep its tokens until they are learned from."""

    job: JobId
    step: Step
    prompt: PromptIndex
    member: Member


class ForgetRollouts(Command, frozen=True, kw_only=True):
    job: JobId
    steps: tuple[Step, ...]


class ReleasePolicy(Command, frozen=True, kw_only=True):
    job: JobId
    weights: BlobRef


class RecordRound(Command, frozen=True, kw_only=True):
    """A round is over; these are the rewards of the answers that were scored."""

    job: JobId
    step: Step
    purpose: Purpose
    version: PolicyVersion
    rewards: tuple[float, ...]


class KeepBest(Command, frozen=True, kw_only=True):
    """These weights scored best so far: commit them to the run's folder."""

    job: JobId
    policy: PolicyRef
    mean: float


class GiveUpSpeculation(Command, frozen=True, kw_only=True):
    """It has cost more than it saved: seconds saved, and the interval that they lie in."""

    job: JobId
    saved: float
    low: float
    high: float


class FinishRun(Command, frozen=True, kw_only=True):
    job: JobId
    status: JobStatus
    error: str | None


class PrepareJob(Command, frozen=True, kw_only=True):
    job: JobId
    spec: JobSpec
    folder: str


class StartJob(Command, frozen=True, kw_only=True):
    job: JobId
    spec: JobSpec
    folder: str
    train_prompts: int
    eval_prompts: int
    workers: tuple[WorkerInfo, ...]


class CancelJob(Command, frozen=True, kw_only=True):
    job: JobId


class RecordStatus(Command, frozen=True, kw_only=True):
    """What `tlt jobs` shows."""

    job: JobId
    status: JobStatus
    error: str | None


WorkerCommand: TypeAlias = (
    OpenJob | CloseJob | StartRollout | StopSpeculation | Learn | ReplaceRanks
)
RunCommand: TypeAlias = (
    WorkerCommand
    | IssuePrompts
    | RequeuePrompts
    | KeepRollout
    | ForgetRollouts
    | ReleasePolicy
    | RecordRound
    | KeepBest
    | GiveUpSpeculation
    | FinishRun
)
SessionCommand: TypeAlias = PrepareJob | StartJob | CancelJob | RecordStatus
