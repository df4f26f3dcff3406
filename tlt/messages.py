"""Everything that travels: events (past tense) say what was, commands (imperative) what to do.

Both are closed unions of frozen, tagged structs; whoever receives one matches all of it.
"""

from typing import Literal, TypeAlias

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


class DrafterRef(Value, frozen=True, kw_only=True):
    """Weights that engines guess with: the drafter's own, never the embedding or head it shares."""

    version: DrafterVersion
    weights: BlobRef
    # what it learned from last; later policies may use it
    policy: PolicyVersion
    # of its shape, which must match
    architecture: Digest
    # of the trunk that it was taken from: what starts over from it has learned no more. None in
    # journals of earlier releases
    updates: int | None = None
    lessons: int | None = None


class TrunkRef(Value, frozen=True, kw_only=True):
    """Where the one drafter stands that all members train: what a member starts from."""

    version: DrafterVersion
    # the trunk that it grew from; what was added to older ones is void
    root: DrafterVersion
    # raw weights and their running mean; None: the drafter that the spec names, or random weights
    weights: BlobRef | None
    # one after the other, which the learning rates depend on; and all micro-batches, those that
    # were learned side by side included
    updates: int
    lessons: int
    # by member: the number of its newest delta in it, and the lessons of the first trunk with that
    merged: dict[str, tuple[int, int]] = {}


class DeltaRef(Value, frozen=True, kw_only=True):
    """What one member has added to a trunk by now: it takes the place of its earlier ones."""

    worker: WorkerId
    incarnation: Incarnation
    rank: int
    # counts up by one for each of the rank's deltas
    number: int
    trunk: DrafterVersion
    blob: BlobRef
    # micro-batches in it; and those in the first trunk with the member's last delta in it
    lessons: int
    known: int

    @property
    def member(self) -> str:
        return f"{self.incarnation}.{self.rank}"


class Lessons(Value, frozen=True, kw_only=True):
    """Tokens that were learned from, by where they came from."""

    # this rank's own finished answers, those of others, parts of answers that are still being
    # written, and answers of the step before
    own: int = 0
    others: int = 0
    running: int = 0
    previous: int = 0

    @property
    def total(self) -> int:
        return self.own + self.others + self.running + self.previous


class Canary(Value, frozen=True, kw_only=True):
    """Accept lengths on answers of the current policy; on held out ones, if there are such."""

    # of the drafter in use, if there is one, and of the one that was trained
    used: float | None
    trained: float
    answers: int


class SampleRef(Value, frozen=True, kw_only=True, array_like=True):
    prompt: PromptIndex
    member: Member
    advantage: float


class MinibatchShare(Value, frozen=True, kw_only=True):
    """What the ranks of one worker do in one optimiser step, and the totals over all workers."""

    ranks: tuple[tuple[SampleRef, ...], ...]
    total_tokens: int
    total_sequences: int


class Joules(Value, frozen=True, kw_only=True):
    """What was spent; None where nobody counts."""

    # by all processors of a host, whoever works there
    host: float | None = None
    # by a worker's own GPUs
    devices: float | None = None


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
    # that the worker and its ranks hold, by their own host's account
    resident_bytes: int = 0


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
    # since the worker opened the job
    joules: Joules | None = None


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
    # None in journals of earlier releases
    version: DrafterVersion | None = None


class DrafterNotKept(Event, frozen=True, kw_only=True):
    """One that was adopted could not be committed to the run's folder."""

    job: JobId
    version: DrafterVersion
    error: str


class SpeculationStopped(Event, frozen=True, kw_only=True):
    """The worker's ranks decode without it from now on, as they were told."""

    job: JobId
    worker: WorkerId
    incarnation: Incarnation


class DrafterLearned(Event, frozen=True, kw_only=True):
    """Some micro-batches of one member: every few of them, and when it leaves."""

    job: JobId
    lesson: int
    policy: PolicyVersion
    delta: DeltaRef
    # since it last said so
    updates: int
    tokens: Lessons
    # in micro-batches that were kept; in reading what others wrote; in publishing
    seconds: float
    reading_seconds: float
    publishing_seconds: float
    # of one micro-batch: the median and the longest
    typical_seconds: float
    longest_seconds: float
    loss: float


class DrafterPreempted(Event, frozen=True, kw_only=True):
    """A worker trains no more: it was told so, or has nothing to learn from."""

    job: JobId
    worker: WorkerId
    incarnation: Incarnation
    lesson: int
    # from the command's arrival at the slowest rank until that had stopped
    seconds: float
    # in micro-batches that were dropped
    dropped_seconds: float
    # of a micro-batch
    typical_seconds: float


class DrafterTrained(Event, frozen=True, kw_only=True):
    """Deltas were merged into a new trunk, and the drafter in it was measured."""

    job: JobId
    worker: WorkerId
    incarnation: Incarnation
    trunk: TrunkRef
    drafter: DrafterRef
    canary: Canary
    seconds: float


class DrafterSpoiled(Event, frozen=True, kw_only=True):
    """What was trained since the last good drafter is void: it diverged, or cannot be read."""

    job: JobId
    worker: WorkerId
    incarnation: Incarnation
    lesson: int
    # that it was told to train
    trunk: DrafterVersion
    error: str


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
    | DrafterLearned
    | DrafterPreempted
    | DrafterTrained
    | DrafterSpoiled
    | DrafterNotKept
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
    # None: the one that the spec names, if it does
    drafter: DrafterRef | None
    requeues: int
    # so many answers of the round are this worker's part: at first it takes no more at once
    share: int


class TrainDrafter(ToWorker, frozen=True, kw_only=True):
    """Said again in the same lesson: go on from this trunk."""

    job: JobId
    step: Step
    lesson: int
    trunk: TrunkRef
    # of prompts of this step and of the one before: they measure what is learned from the others
    held_out: dict[Step, tuple[PromptIndex, ...]] = {}


class PreemptDrafter(ToWorker, frozen=True, kw_only=True):
    """Drop the micro-batch in hand, hand in what was learned, be free."""

    job: JobId
    lesson: int


class MergeDrafter(ToWorker, frozen=True, kw_only=True):
    """Make the next trunk of what has arrived, and measure the drafter in it."""

    job: JobId
    step: Step
    lesson: int
    version: DrafterVersion
    trunk: TrunkRef
    deltas: tuple[DeltaRef, ...]


class AdoptDrafter(ToWorker, frozen=True, kw_only=True):
    """In the middle of a rollout: its tokens do not change, only their speed."""

    job: JobId
    # None: what the spec names
    drafter: DrafterRef | None


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


class ReleaseBlobs(Command, frozen=True, kw_only=True):
    """Nobody needs them in flight any more."""

    job: JobId
    blobs: tuple[BlobRef, ...]


class DiscardBlobs(Command, frozen=True, kw_only=True):
    """Nobody needs them any more, in flight or in the run's folder."""

    job: JobId
    blobs: tuple[BlobRef, ...]


class KeepDrafter(Command, frozen=True, kw_only=True):
    """It is used from now on: commit it to the run's folder."""

    job: JobId
    drafter: DrafterRef


Decision = Literal["train", "rest", "buy", "adopt", "reject", "return"]


class ExplainDrafting(Command, frozen=True, kw_only=True):
    """Why the drafter is trained, or isn't: seconds of the job's, as predicted."""

    job: JobId
    what: Decision
    saved: float
    cost: float
    why: str


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
    OpenJob
    | CloseJob
    | StartRollout
    | StopSpeculation
    | TrainDrafter
    | PreemptDrafter
    | MergeDrafter
    | AdoptDrafter
    | Learn
    | ReplaceRanks
)
RunCommand: TypeAlias = (
    WorkerCommand
    | IssuePrompts
    | RequeuePrompts
    | KeepRollout
    | ForgetRollouts
    | ReleaseBlobs
    | DiscardBlobs
    | KeepDrafter
    | ExplainDrafting
    | RecordRound
    | KeepBest
    | GiveUpSpeculation
    | FinishRun
)
SessionCommand: TypeAlias = PrepareJob | StartJob | CancelJob | RecordStatus
