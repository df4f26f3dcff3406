"""References to weights and answers in files, and spans that say where tokens came from."""

from typing import Annotated

import msgspec

from tlt.base.id_types import (
    FILE_NAME,
    Attempt,
    Count,
    Digest,
    DrafterVersion,
    FileName,
    Finite,
    Incarnation,
    JobName,
    Member,
    OptionalFileName,
    PathName,
    PolicyVersion,
    PromptIndex,
    Step,
    WorkerId,
)

SCHEMA_VERSION = 6


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message."""


class BlobRef(Value, frozen=True, kw_only=True):
    """A content-addressed file: its digest is its name."""

    digest: Annotated[Digest, FILE_NAME]
    bytes: Count


class AnswerRef(Value, frozen=True, kw_only=True, array_like=True):
    """The place of an answer in a file of the run's folder."""

    file: OptionalFileName
    offset: Count
    bytes: Count
    digest: Digest


class ResumedAnswer(Value, frozen=True, kw_only=True):
    """An answer that was cut, to be gone on with."""

    step: Step
    prompt: PromptIndex
    member: Member
    attempt: Attempt
    excused: Count
    # its tokens so far, if it has any
    prefix: AnswerRef | None


class PolicySpan(Value, frozen=True, kw_only=True, array_like=True):
    """`tokens` consecutive tokens were drawn from this policy version."""

    version: PolicyVersion
    tokens: Count


class DrafterSpan(Value, frozen=True, kw_only=True, array_like=True):
    """`tokens` consecutive tokens were decoded while this drafter version was proposing."""

    version: DrafterVersion | None
    tokens: Count


class OriginSpan(Value, frozen=True, kw_only=True, array_like=True):
    """`tokens` consecutive tokens are of one origin: 'plain', 'accepted' or 'corrected'.

    'environment' is that of tokens which the policy hasn't drawn.
    """

    origin: str
    tokens: Count


class AcceptedCounts(Value, frozen=True, kw_only=True, array_like=True):
    """Steps of one answer by the number of drafts that they accepted: 0, 1, 2, ..."""

    # None: n-grams
    drafter: DrafterVersion | None
    steps: tuple[Count, ...]


class BatchSpan(Value, frozen=True, kw_only=True, array_like=True):
    """`tokens` consecutive tokens were decoded in a running batch of `size`."""

    size: Count
    tokens: Count


class PolicyRef(Value, frozen=True, kw_only=True):
    """A version of the policy's weights; version 0 is the folder that the spec names."""

    version: PolicyVersion
    weights: BlobRef | None
    # the LoRA adapter that `weights` contain, if that is what is trained
    adapter: BlobRef | None = None

    @property
    def blobs(self) -> tuple[BlobRef, ...]:
        return tuple(blob for blob in (self.weights, self.adapter) if blob is not None)


class Checkpoint(Value, frozen=True, kw_only=True):
    """Policy and optimiser of one version, as files in the run's folder."""

    version: PolicyVersion
    weights: BlobRef
    # None where ranks split one copy: each has written a file of its own
    optimiser: BlobRef | None
    # the files of torch.distributed.checkpoint by name
    optimiser_shards: dict[FileName, BlobRef] = {}
    adapter: BlobRef | None = None

    @property
    def policy(self) -> PolicyRef:
        return PolicyRef(version=self.version, weights=self.weights, adapter=self.adapter)

    @property
    def blobs(self) -> tuple[BlobRef, ...]:
        """Return all files of the checkpoint."""
        return (*self.policy.blobs, *self.blobs_of_optimiser)

    @property
    def blobs_of_optimiser(self) -> tuple[BlobRef, ...]:
        whole = () if self.optimiser is None else (self.optimiser,)
        return (*whole, *self.optimiser_shards.values())


class DrafterRef(Value, frozen=True, kw_only=True):
    """A drafter version: its own weights, without the embedding and head that the policy lends."""

    version: DrafterVersion
    weights: BlobRef
    # the policy whose answers it was last trained on; later policies may use it too
    policy: PolicyVersion
    # digest of its shape
    architecture: Digest
    # updates and micro-batches of the base that holds it; a lineage that restarts from it begins
    # with these counts
    updates: Count
    micro_batches: Count


class SourceCursor(Value, frozen=True, kw_only=True):
    """The next prompt of one source of a mixture."""

    # how many the source has
    prompts: Count
    epoch: Count = 0
    position: Count = 0
    # those that it has given so far; the others that are behind its position were skipped
    drawn: Count = 0


class PromptCursor(Value, frozen=True, kw_only=True):
    """The next prompt of a job; a job that starts from another one's checkpoint begins with it."""

    epoch: Count = 0
    # prompts of the epoch that are used or skipped
    position: Count = 0
    # by prompt that was solved: the last epoch in which it is skipped
    skipped: dict[PromptIndex, Count] = {}
    # of a mixture: the place in each source, instead of `epoch` and `position`
    sources: tuple[SourceCursor, ...] = ()
    # taken before, and put off to a later step: the first to be put off comes first
    deferred: tuple[PromptIndex, ...] = ()


class StartingCheckpoint(Value, frozen=True, kw_only=True):
    """A checkpoint of another job that a job starts from; its blobs are in both jobs' folders."""

    job: JobName
    # of the other job
    folder: PathName
    checkpoint: Checkpoint
    # behind the prompts of the last step; None where the data or their order are others
    cursor: PromptCursor | None = None
    # None: the drafter that the spec names, or a new one
    drafter: DrafterRef | None = None
    # of that drafter, when the other job last evaluated it
    accept_length: Finite | None = None

    @property
    def name(self) -> str:
        """Return the name that `tlt submit --from` takes."""
        return f"{self.job}@{self.checkpoint.version}"

    @property
    def blobs(self) -> tuple[BlobRef, ...]:
        """Return all files that the job needs."""
        drafter = () if self.drafter is None else (self.drafter.weights,)
        return (*self.checkpoint.blobs, *drafter)


class DrafterBase(Value, frozen=True, kw_only=True):
    """The weights that members start from and that their deltas are added to."""

    version: DrafterVersion
    # the first version of the lineage; deltas to bases of other lineages are void
    root: DrafterVersion
    # raw weights and their running mean; None: the drafter that the spec names, or random weights
    weights: BlobRef | None
    # updates made one after the other; the learning-rate schedule counts them
    updates: Count
    # micro-batches of all members, including those trained at the same time
    micro_batches: Count
    # by member: the number of its newest delta in this base, and the micro-batches of the first
    # base that contains that delta
    merged: dict[str, tuple[Count, Count]] = {}


class DrafterDelta(Value, frozen=True, kw_only=True):
    """All changes of one member that the base lacks; it replaces the member's earlier deltas."""

    worker: WorkerId
    incarnation: Incarnation
    rank: Count
    # serial number among the rank's deltas
    number: Count
    base: DrafterVersion
    blob: BlobRef
    micro_batches: Count
    # micro-batches of the first base that contains the member's previous delta
    previous_micro_batches: Count

    @property
    def member(self) -> str:
        """Return the name of the rank that made it."""
        return f"{self.incarnation}.{self.rank}"


class SampleRef(Value, frozen=True, kw_only=True, array_like=True):
    """An answer of the step, its reward and advantage, and its place."""

    prompt: PromptIndex
    member: Member
    reward: Finite
    # not used where the ranks compute advantages
    advantage: Finite
    answer: AnswerRef


class MinibatchShare(Value, frozen=True, kw_only=True):
    """The samples of one worker's ranks in one optimiser step, and totals over all workers."""

    ranks: tuple[tuple[SampleRef, ...], ...]
    total_tokens: Count
    total_sequences: Count
