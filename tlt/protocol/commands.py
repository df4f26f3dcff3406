"""Commands say what to do, in the imperative: a closed union of frozen, tagged structs.

A worker passes its commands on to its ranks as they are. `PromptIssued` is no command, but the
entry of the prompts stream that `IssuePrompts` leads to.
"""

from typing import Literal, TypeAlias

import msgspec

from tlt.base.id_types import (
    Attempt,
    Count,
    DrafterVersion,
    Epoch,
    Incarnation,
    JobName,
    JobStatus,
    Member,
    PathName,
    PolicyVersion,
    PromptIndex,
    Purpose,
    Step,
    WorkerId,
)
from tlt.protocol.refs import (
    AnswerRef,
    BlobRef,
    Checkpoint,
    DrafterBase,
    DrafterDelta,
    DrafterRef,
    MinibatchShare,
    PolicyRef,
    ResumedAnswer,
    StartingCheckpoint,
)
from tlt.protocol.shared_values import Pause, Prepared, SetAnswers, SizingFacts, WorkerInfo
from tlt.spec.config import JobSpec


class PromptIssued(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An answer that some worker is to write: an entry of the job's prompts stream."""

    job: JobName
    epoch: Epoch
    step: Step
    attempt: Attempt
    purpose: Purpose
    prompt: PromptIndex
    member: Member
    tokens: tuple[Count, ...]
    # the evaluation set of a held-out prompt, which may say how it is answered
    set: str | None = None
    # attempts that ended with the whole session, and don't count as tries
    excused: Count = 0
    # the tokens so far of an answer that was cut
    prefix: AnswerRef | None = None


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An instruction that `decide` or a user gives."""


class JobCommand(Command, frozen=True, kw_only=True):
    """A command about one job."""

    job: JobName


class ToWorker(Command, frozen=True, kw_only=True):
    """A command to one incarnation of a worker."""

    worker: WorkerId
    incarnation: Incarnation


class ToWorkerOfJob(ToWorker, frozen=True, kw_only=True):
    """A command to one incarnation of a worker about one job."""

    job: JobName


# --- to workers


class OpenJob(ToWorkerOfJob, frozen=True, kw_only=True):
    """Load the policy and get ready to decode."""

    epoch: Epoch
    spec: JobSpec
    folder: PathName
    # absent if the spec leaves no size open, as in journals of earlier versions
    sizing: SizingFacts | msgspec.UnsetType = msgspec.UNSET


class CloseJob(ToWorkerOfJob, frozen=True, kw_only=True):
    """Drop what is running and forget the job."""


class StartRollout(ToWorkerOfJob, frozen=True, kw_only=True):
    """Answer prompts from the job's queue with this policy and drafter."""

    epoch: Epoch
    step: Step
    purpose: Purpose
    policy: PolicyRef
    # None: the drafter that the spec names, if it names one
    drafter: DrafterRef | None
    requeues: Count
    # answers of the rollout batch that the worker may take before it leaves some to the others
    share: Count
    # False while drafter training doesn't pay, so that nobody will read the answers
    keep_answers: bool
    # False while speculation is given up
    speculate: bool


class CutAnswers(ToWorkerOfJob, frozen=True, kw_only=True):
    """Report the tokens of unfinished answers to training prompts, and take no more."""


class TrainDrafter(ToWorkerOfJob, frozen=True, kw_only=True):
    """Train the drafter from this base; within one training session a later base replaces it."""

    step: Step
    training_session: Count
    base: DrafterBase
    # ranks that train at the same time, whose work is averaged
    members: Count = 1
    # prompts of this step and the one before whose answers evaluate drafters
    held_out: dict[Step, tuple[PromptIndex, ...]] = {}


class StopDrafterTraining(ToWorkerOfJob, frozen=True, kw_only=True):
    """End the training session: drop the micro-batch in progress and publish its work."""

    training_session: Count


class MergeDrafter(ToWorkerOfJob, frozen=True, kw_only=True):
    """Merge deltas into the next base, and evaluate the drafter in it."""

    step: Step
    training_session: Count
    version: DrafterVersion
    base: DrafterBase
    deltas: tuple[DrafterDelta, ...]


class AdoptDrafter(ToWorkerOfJob, frozen=True, kw_only=True):
    """Swap drafters in the middle of a rollout, which changes its speed but not its tokens."""

    # None: the drafter that the spec names, or none
    drafter: DrafterRef | None


class UpdatePolicy(ToWorkerOfJob, frozen=True, kw_only=True):
    """Bring the trainer from `version` to `version + 1`, with all ranks of all workers."""

    epoch: Epoch
    step: Step
    attempt: Attempt
    version: PolicyVersion
    rendezvous: str
    group: str
    world: Count
    first_rank: Count
    # the checkpoint that every rank loads first; None: each rank keeps the weights it holds
    restore: Checkpoint | None
    # where ranks split one copy: split it anew, from `restore` or from the policy's folder
    reload: bool = False
    # global rank whose state is broadcast first because another rank holds an older one
    sync_from: Count | None
    minibatches: tuple[MinibatchShare, ...]
    # the first rank commits policy and optimiser to the run's folder afterwards
    checkpoint: bool


class ReplaceRanks(ToWorker, frozen=True, kw_only=True):
    """Start fresh ranks, because a collective failed and the state of the present ones is void."""

    reason: str


# --- prompts and blobs


class IssuePrompts(JobCommand, frozen=True, kw_only=True):
    """Add the prompts of a rollout batch to the job's queue."""

    epoch: Epoch
    step: Step
    purpose: Purpose
    prompts: tuple[PromptIndex, ...]
    # answers to each prompt; the most, where prompts differ
    members: int
    # the group that they replace, if the batch is open already
    replaces: PromptIndex | None = None
    # where prompts differ
    members_by_prompt: tuple[int, ...] = ()

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the answers by prompt."""
        return self.members_by_prompt or (self.members,) * len(self.prompts)


class ResumeAnswers(JobCommand, frozen=True, kw_only=True):
    """Add answers that were cut to the job's queue."""

    epoch: Epoch
    answers: tuple[ResumedAnswer, ...]


class RequeuePrompts(JobCommand, frozen=True, kw_only=True):
    """Return the prompts that this incarnation held to the queue."""

    incarnation: Incarnation
    # True if the job was paused, which is no failed try
    excused: bool = False


class ReleaseBlobs(JobCommand, frozen=True, kw_only=True):
    """Delete blobs from shared memory; copies in the run's folder stay."""

    blobs: tuple[BlobRef, ...]


class DiscardBlobs(JobCommand, frozen=True, kw_only=True):
    """Delete blobs from shared memory and from the run's folder."""

    blobs: tuple[BlobRef, ...]


# --- records of the run


class CommitDrafter(JobCommand, frozen=True, kw_only=True):
    """Commit an adopted drafter to the run's folder."""

    drafter: DrafterRef


# "wait": don't train now; "restart": training restarts from the drafter in use
DrafterDecision = Literal["train", "wait", "adopt", "reject", "restart"]


class ExplainDrafterDecision(JobCommand, frozen=True, kw_only=True):
    """Record why the drafter is trained or isn't."""

    kind: DrafterDecision
    why: str


class RecordRolloutBatch(JobCommand, frozen=True, kw_only=True):
    """Record the rewards of a rollout batch that is complete."""

    step: Step
    purpose: Purpose
    version: PolicyVersion
    # of the answers that have one
    rewards: tuple[float, ...]
    # the mean of each of several rewards, and of each measure of an environment, by its name
    parts: dict[str, float] = {}
    # of an evaluation: all answers of each set
    sets: tuple[SetAnswers, ...] = ()
    # of a mixture: the mean reward of each source, by its name
    sources: dict[str, float] = {}


class CommitBestPolicy(JobCommand, frozen=True, kw_only=True):
    """Commit the weights that scored best so far to the run's folder."""

    policy: PolicyRef
    mean: float


class GiveUpSpeculation(JobCommand, frozen=True, kw_only=True):
    """Report that speculation is off for some batches, because it cost more than it saved."""

    # seconds, and their interval
    savings: float
    low: float
    high: float
    batches: int


class ResumeSpeculation(JobCommand, frozen=True, kw_only=True):
    """Report that speculation is tried again."""


# --- jobs of the session; deciders also take these as events, from users and from one another


class PrepareJob(JobCommand, frozen=True, kw_only=True):
    """Read and tokenise the data, and check the model folder."""

    spec: JobSpec
    folder: PathName


class StartJob(JobCommand, frozen=True, kw_only=True):
    """Start a job's run on these workers."""

    epoch: Epoch
    spec: JobSpec
    folder: PathName
    prepared: Prepared
    workers: tuple[WorkerInfo, ...]
    starts_from: StartingCheckpoint | None = None


class CancelJob(JobCommand, frozen=True, kw_only=True):
    """Cancel a job; if its run has begun, the run ends it."""


class PauseJob(JobCommand, frozen=True, kw_only=True):
    """Pause a job, because a user asked for it or because it lacks something."""

    shortage: str | None = None


class SuspendJob(JobCommand, frozen=True, kw_only=True):
    """Record that a paused job's run has given back all of its workers."""


class ResumeJob(JobCommand, frozen=True, kw_only=True):
    """Queue a paused job; the session itself resumes those that it has paused."""

    by_session: bool = False


class ContinueJob(JobCommand, frozen=True, kw_only=True):
    """Let the run of a resumed job go on, on these workers."""

    workers: tuple[WorkerInfo, ...]
    newest_incarnations: dict[WorkerId, Incarnation]


class EndJob(JobCommand, frozen=True, kw_only=True):
    """Close the records of a job that is done, failed or cancelled."""

    status: JobStatus
    error: str | None


class AssignWorker(JobCommand, frozen=True, kw_only=True):
    """Let a worker join a running job, in the place of a lost one."""

    info: WorkerInfo


class RecordStatus(JobCommand, frozen=True, kw_only=True):
    """Record the status that `tlt jobs` shows."""

    status: JobStatus
    error: str | None
    pause: Pause | None = None


# commands that a worker passes on to its ranks
RankCommand: TypeAlias = (
    OpenJob
    | CloseJob
    | StartRollout
    | CutAnswers
    | TrainDrafter
    | StopDrafterTraining
    | MergeDrafter
    | AdoptDrafter
    | UpdatePolicy
)

WorkerCommand: TypeAlias = RankCommand | ReplaceRanks

RunCommand: TypeAlias = (
    WorkerCommand
    | IssuePrompts
    | ResumeAnswers
    | RequeuePrompts
    | ReleaseBlobs
    | DiscardBlobs
    | CommitDrafter
    | ExplainDrafterDecision
    | RecordRolloutBatch
    | CommitBestPolicy
    | GiveUpSpeculation
    | ResumeSpeculation
    | SuspendJob
    | EndJob
)

UserCommand: TypeAlias = CancelJob | PauseJob | ResumeJob

SessionCommand: TypeAlias = (
    PrepareJob | StartJob | CancelJob | PauseJob | ContinueJob | AssignWorker | RecordStatus
)
