"""Commands: what to do, in the imperative. A closed union of frozen, tagged structs."""

from typing import Literal, TypeAlias

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
    WorkerId,
)
from tlt.protocol.records import WorkerInfo
from tlt.protocol.refs import (
    BlobRef,
    Checkpoint,
    DrafterBase,
    DrafterDelta,
    DrafterRef,
    MinibatchShare,
    PolicyRef,
)


class PromptIssued(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    job: JobId
    epoch: Epoch
    step: Step
    attempt: Attempt
    purpose: Purpose
    prompt: PromptIndex
    member: Member
    tokens: tuple[int, ...]


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
    training_session: int
    base: DrafterBase
    # of prompts of this step and of the one before: they measure what is learned from the others
    held_out: dict[Step, tuple[PromptIndex, ...]] = {}


class StopDrafterTraining(ToWorker, frozen=True, kw_only=True):
    """Drop the micro-batch in hand, hand in what was learned, be free."""

    job: JobId
    training_session: int


class MergeDrafter(ToWorker, frozen=True, kw_only=True):
    """Make the next trunk of what has arrived, and measure the drafter in it."""

    job: JobId
    step: Step
    training_session: int
    version: DrafterVersion
    base: DrafterBase
    deltas: tuple[DrafterDelta, ...]


class AdoptDrafter(ToWorker, frozen=True, kw_only=True):
    """In the middle of a rollout: its tokens do not change, only their speed."""

    job: JobId
    # None: what the spec names
    drafter: DrafterRef | None


class StopSpeculation(ToWorker, frozen=True, kw_only=True):
    """For the rest of the job."""

    job: JobId


class UpdatePolicy(ToWorker, frozen=True, kw_only=True):
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


class CommitDrafter(Command, frozen=True, kw_only=True):
    """It is used from now on: commit it to the run's folder."""

    job: JobId
    drafter: DrafterRef


Decision = Literal["train", "rest", "buy", "adopt", "reject", "return"]


class ExplainDrafterDecision(Command, frozen=True, kw_only=True):
    """Why the drafter is trained, or isn't: seconds of the job's, as predicted."""

    job: JobId
    what: Decision
    saved: float
    cost: float
    why: str


class RecordRolloutBatch(Command, frozen=True, kw_only=True):
    """A round is over; these are the rewards of the answers that were scored."""

    job: JobId
    step: Step
    purpose: Purpose
    version: PolicyVersion
    rewards: tuple[float, ...]


class CommitBestPolicy(Command, frozen=True, kw_only=True):
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
    | StopDrafterTraining
    | MergeDrafter
    | AdoptDrafter
    | UpdatePolicy
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
    | CommitDrafter
    | ExplainDrafterDecision
    | RecordRolloutBatch
    | CommitBestPolicy
    | GiveUpSpeculation
    | FinishRun
)

SessionCommand: TypeAlias = PrepareJob | StartJob | CancelJob | RecordStatus
