"""References to what lies in files, and the spans that say where tokens came from."""

import msgspec

from tlt.ids import (
    Digest,
    DrafterVersion,
    Incarnation,
    Member,
    PolicyVersion,
    PromptIndex,
    WorkerId,
)

SCHEMA_VERSION = 2


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
    micro_batches: int | None = None


class DrafterBase(Value, frozen=True, kw_only=True):
    """Where the one drafter stands that all members train: what a member starts from."""

    version: DrafterVersion
    # the trunk that it grew from; what was added to older ones is void
    root: DrafterVersion
    # raw weights and their running mean; None: the drafter that the spec names, or random weights
    weights: BlobRef | None
    # one after the other, which the learning rates depend on; and all micro-batches, those that
    # were learned side by side included
    updates: int
    micro_batches: int
    # by member: the number of its newest delta in it, and the lessons of the first trunk with that
    merged: dict[str, tuple[int, int]] = {}


class DrafterDelta(Value, frozen=True, kw_only=True):
    """What one member has added to a trunk by now: it takes the place of its earlier ones."""

    worker: WorkerId
    incarnation: Incarnation
    rank: int
    # counts up by one for each of the rank's deltas
    number: int
    base: DrafterVersion
    blob: BlobRef
    # micro-batches in it; and those in the first trunk with the member's last delta in it
    micro_batches: int
    known: int

    @property
    def member(self) -> str:
        return f"{self.incarnation}.{self.rank}"


class SampleRef(Value, frozen=True, kw_only=True, array_like=True):
    prompt: PromptIndex
    member: Member
    advantage: float


class MinibatchShare(Value, frozen=True, kw_only=True):
    """What the ranks of one worker do in one optimiser step, and the totals over all workers."""

    ranks: tuple[tuple[SampleRef, ...], ...]
    total_tokens: int
    total_sequences: int
