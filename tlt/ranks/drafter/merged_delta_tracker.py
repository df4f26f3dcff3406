"""Track which of a member's work is in the base, so that all of it is merged exactly once.

A delta holds all work that no base contained when it was published. Once a base contains that
delta, later deltas start there.
"""

from tlt.base.interrupt_check import CheckInterrupt, never_interrupt
from tlt.protocol.refs import DrafterBase
from tlt.trainer.drafter.delta_merging import (
    BaseWeights,
    Delta,
    DrafterSnapshot,
    Store,
    add_delta,
    compute_delta,
    rebase_snapshot,
)
from tlt.trainer.drafter.drafter_learner import DrafterLearner

# Limits of the published deltas whose snapshots are kept; each is as large as weights and mean
# together. A merge may take as long as the publication of that many: as publishing takes a small
# share of the time, four large deltas take eighty times as long as one publication.
_LEAST_SNAPSHOTS, _MOST_SNAPSHOTS = 4, 16
SNAPSHOT_BYTES = 64 << 20


class DeltaTracker:
    """A member's learner, its base, and its deltas that may not be merged yet."""

    def __init__(self, member: str, learner: DrafterLearner) -> None:
        self.learner = learner
        snapshot = learner.snapshot()
        # the learner's initial weights, which are about the same for all members of one seed
        self.root = BaseWeights(
            tensors=snapshot.tensors, updates=snapshot.updates, micro_batches=0, d2t=snapshot.d2t
        )
        self.base: DrafterBase | None = None
        self._member = member
        self._weights = self.root
        # micro-batches of the first base that contained this member's last delta
        self._known = 0
        # by number of a delta that may not be merged yet: the learner when it was published
        self._snapshots: dict[int, DrafterSnapshot] = {}
        # the newest delta that is merged
        self._merged = -1
        size = sum(tensor.nbytes for tensor in snapshot.tensors.values())
        self._kept = min(max(_LEAST_SNAPSHOTS, SNAPSHOT_BYTES // size), _MOST_SNAPSHOTS)

    def is_known(self, base: DrafterBase) -> bool:
        """Return True if the member can tell how much of its work a new base contains."""
        number = self._merged_number(base)
        given_up = self.base is not None and self.base.root != base.root
        return not given_up and (number <= self._merged or number in self._snapshots)

    def move_to(
        self, base: DrafterBase, weights: BaseWeights, check: CheckInterrupt = never_interrupt
    ) -> None:
        """Continue from another base; work that isn't known in it is lost (`is_known`).

        An interrupt leaves everything as it was.
        """
        number = self._merged_number(base)
        if not self.is_known(base):
            since, snapshots = self.learner.snapshot(check), dict[int, DrafterSnapshot]()
        elif number <= self._merged:
            since, snapshots = self._weights, self._snapshots
        else:
            since = self._snapshots[number]
            snapshots = {n: found for n, found in self._snapshots.items() if n > number}
        snapshots = {
            n: rebase_snapshot(found, since, weights, check) for n, found in snapshots.items()
        }
        check()
        if self.learner.updates == since.updates:
            # nothing is left to merge, so the learner restarts from this base
            self._known = weights.micro_batches
        elif since is not self._weights:
            self._known = base.merged[self._member][1]
        self.learner.rebase(since, weights)
        self._snapshots, self._merged = snapshots, max(self._merged, number)
        self._weights, self.base = weights, base

    def take_delta(
        self, number: int, store: Store, check: CheckInterrupt = never_interrupt
    ) -> Delta:
        """Store all work that the base lacks; an interrupt leaves everything as it was."""
        now = self.learner.live()
        delta = compute_delta(now, self._weights, self._known, store, check)
        d2t = None if now.d2t is None else now.d2t.to("cpu", copy=True)
        self._snapshots[number] = add_delta(self._weights, delta, d2t)
        for old in sorted(self._snapshots)[: -self._kept]:
            del self._snapshots[old]
        return delta

    def _merged_number(self, base: DrafterBase) -> int:
        number, _ = base.merged.get(self._member, (-1, 0))
        return number
