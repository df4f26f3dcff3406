"""The lineage of drafter versions: every delta is merged into one base or into none.

Members hand in deltas against the base they train from, and one member merges them into the next
base. Functions that drop blobs return them: the caller releases those that nothing else names.
"""

from collections.abc import Collection

import msgspec

from tlt.base.id_types import DrafterVersion, Incarnation, WorkerId
from tlt.protocol.events import DrafterMerged
from tlt.protocol.refs import BlobRef, DrafterBase, DrafterDelta, DrafterRef
from tlt.protocol.shared_values import WorkerInfo

Blobs = tuple[BlobRef, ...]


class Merge(msgspec.Struct, frozen=True, kw_only=True):
    """A merge of these deltas into the next base, requested from a member."""

    worker: WorkerId
    incarnation: Incarnation
    version: DrafterVersion
    deltas: tuple[DrafterDelta, ...]
    # seconds of training that the deltas took
    training_seconds: float
    # deltas that the member has handed in since the request instead of merging
    deltas_since: int = 0


class Lineage(msgspec.Struct, frozen=True, kw_only=True):
    # the last version whose merge was requested from a member
    newest_version: DrafterVersion = DrafterVersion(0)
    base: DrafterBase = DrafterBase(
        version=DrafterVersion(0), root=DrafterVersion(0), weights=None, updates=0, micro_batches=0
    )
    # the newest delta of each member that is not merged yet
    deltas: tuple[DrafterDelta, ...] = ()
    # by present member: the number of its newest delta, and the last base that contains a delta
    newest_delta: dict[str, int] = {}
    merged_into: dict[str, DrafterVersion] = {}
    merge: Merge | None = None
    # seconds that all members have trained since the deltas that the base contains
    unmerged_seconds: float = 0.0
    # duration of the last merge with its evaluation and publication; 0 before the first
    merge_seconds: float = 0.0

    @property
    def blobs(self) -> Blobs:
        """Return the blobs that members may still read."""
        merging = () if self.merge is None else self.merge.deltas
        base = () if self.base.weights is None else (self.base.weights,)
        return (*(delta.blob for delta in (*self.deltas, *merging)), *base)

    @property
    def unmerged_micro_batches(self) -> int:
        return sum(delta.micro_batches for delta in self.deltas)


def is_new(lineage: Lineage, delta: DrafterDelta) -> bool:
    return delta.number > lineage.newest_delta.get(delta.member, -1)


def add_delta(lineage: Lineage, delta: DrafterDelta, seconds: float) -> tuple[Lineage, Blobs]:
    """Replace the member's earlier delta, which the new one contains; `seconds` passed since it.

    Drop a delta against weights that were given up or that lack the member's merged deltas: the
    member hands in the same work again against the newer base.
    """
    root = lineage.base.root
    known = {**lineage.newest_delta, delta.member: delta.number}
    trained = lineage.unmerged_seconds + (0.0 if delta.base < root else seconds)
    lineage = msgspec.structs.replace(lineage, newest_delta=known, unmerged_seconds=trained)
    if delta.base < max(root, lineage.merged_into.get(delta.member, root)):
        return lineage, (delta.blob,)
    earlier = tuple(d.blob for d in lineage.deltas if d.member == delta.member)
    others = tuple(d for d in lineage.deltas if d.member != delta.member)
    return msgspec.structs.replace(lineage, deltas=(*others, delta)), earlier


def start_merge(lineage: Lineage, worker: WorkerInfo) -> tuple[Lineage, Merge]:
    version = _next_version(lineage)
    merge = Merge(
        worker=worker.worker,
        incarnation=worker.incarnation,
        version=version,
        deltas=lineage.deltas,
        training_seconds=lineage.unmerged_seconds,
    )
    return msgspec.structs.replace(lineage, newest_version=version, merge=merge), merge


def count_delta_since(lineage: Lineage, merge: Merge) -> Lineage:
    """Count a delta that the merging member has handed in instead of merging."""
    waited = msgspec.structs.replace(merge, deltas_since=merge.deltas_since + 1)
    return msgspec.structs.replace(lineage, merge=waited)


def cancel_merge(lineage: Lineage, incarnation: Incarnation) -> tuple[Lineage, Blobs]:
    merge = lineage.merge
    if merge is None or merge.incarnation != incarnation:
        return lineage, ()
    unused = tuple(delta.blob for delta in merge.deltas)
    return msgspec.structs.replace(lineage, merge=None), unused


def is_awaited(lineage: Lineage, event: DrafterMerged) -> bool:
    merge = lineage.merge
    return merge is not None and (merge.incarnation, merge.version) == (
        event.incarnation,
        event.base.version,
    )


def replace_base(
    lineage: Lineage, base: DrafterBase, merge_seconds: float
) -> tuple[Lineage, Blobs]:
    """Continue from the merged base, and forget lost members in it."""
    assert lineage.merge is not None
    alive, merged = lineage.newest_delta, lineage.merge.deltas
    members = {delta.member for delta in merged}
    unused = [delta.blob for delta in merged]
    unused += [delta.blob for delta in lineage.deltas if delta.member in members]
    if lineage.base.weights is not None:
        unused.append(lineage.base.weights)
    contained = {member: number for member, number in base.merged.items() if member in alive}
    after = msgspec.structs.replace(
        lineage,
        merge=None,
        base=msgspec.structs.replace(base, merged=contained),
        deltas=tuple(delta for delta in lineage.deltas if delta.member not in members),
        unmerged_seconds=lineage.unmerged_seconds - lineage.merge.training_seconds,
        merge_seconds=merge_seconds,
        merged_into={
            **lineage.merged_into,
            **{member: base.version for member in members if member in alive},
        },
    )
    return after, tuple(unused)


def begin_new_root(lineage: Lineage, used: DrafterRef | None) -> tuple[Lineage, Blobs]:
    """Begin a new root from the drafter in use, and give up all work since."""
    version = _next_version(lineage)
    base = DrafterBase(
        version=version,
        root=version,
        weights=None if used is None else used.weights,
        updates=0 if used is None else used.updates,
        micro_batches=0 if used is None else used.micro_batches,
    )
    after = msgspec.structs.replace(
        lineage, newest_version=version, base=base, deltas=(), merge=None, unmerged_seconds=0.0
    )
    return after, lineage.blobs


def remove_members(lineage: Lineage, members: Collection[str]) -> Lineage:
    """Forget lost members, but keep the deltas that they handed in."""
    return msgspec.structs.replace(
        lineage,
        newest_delta={m: n for m, n in lineage.newest_delta.items() if m not in members},
        merged_into={m: v for m, v in lineage.merged_into.items() if m not in members},
    )


def _next_version(lineage: Lineage) -> DrafterVersion:
    return DrafterVersion(lineage.newest_version + 1)
