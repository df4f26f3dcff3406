"""One learner among those that make a drafter: what of it is in a trunk, and what isn't yet.

Whatever was learned is added to the lineage of trunks once: a delta holds all that no trunk held
when it was handed in, and once a trunk has it, the learner counts from there.
"""

from tlt.interrupt import CheckInterrupt, never_interrupt
from tlt.protocol.refs import DrafterBase
from tlt.trainer.drafter.delta_merging import (
    BaseWeights,
    Delta,
    DrafterSnapshot,
    compute_delta,
    rebase_snapshot,
)
from tlt.trainer.drafter.drafter_learner import DrafterLearner

# deltas whose mark is kept, each as large as weights and mean together: a merge may take as long
# as these took to come. Handing in takes so small a share of the time that four large ones come in
# eighty times what one of them takes
_LEAST_MARKS, _MOST_MARKS = 4, 16
_MARKED_BYTES = 64 << 20


class DeltaTracker:
    def __init__(self, name: str, learner: DrafterLearner) -> None:
        self.learner = learner
        mark = learner.snapshot()
        # where it began: about there, all that have the same seed
        self.root = BaseWeights(tensors=mark.tensors, updates=mark.updates, micro_batches=0)
        self.ref: DrafterBase | None = None
        self._name = name
        self._trunk = self.root
        # lessons of the first trunk that had this member's last delta in it
        self._known = 0
        # where the learner was when it handed in a delta that may not be in a trunk yet
        self._marks: dict[int, DrafterSnapshot] = {}
        self._merged = -1
        size = sum(tensor.nbytes for tensor in mark.tensors.values())
        self._kept = min(max(_LEAST_MARKS, _MARKED_BYTES // size), _MOST_MARKS)

    def stand_on(
        self, ref: DrafterBase, base: BaseWeights, check: CheckInterrupt = never_interrupt
    ) -> bool:
        """False if what was learned since the last delta is lost. A look may put it off."""
        known, number = self._knows(ref), self._merged_in(ref)
        if not known:
            # it goes on from the trunk as it is
            since, marks = self.learner.snapshot(check), dict[int, DrafterSnapshot]()
        elif number <= self._merged:
            since, marks = self._trunk, self._marks
        else:
            since = self._marks[number]
            marks = {n: mark for n, mark in self._marks.items() if n > number}
        marks = {n: rebase_snapshot(mark, since, base, check) for n, mark in marks.items()}
        check()
        if self.learner.updates == since.updates:
            self._known = base.micro_batches  # it begins from there
        elif since is not self._trunk:
            self._known = ref.merged[self._name][1]
        self.learner.rebase(since, base)
        self._marks, self._merged = marks, max(self._merged, number)
        self._trunk, self.ref = base, ref
        return known

    def hand_in(self, number: int, check: CheckInterrupt = never_interrupt) -> Delta:
        """A look may put it off."""
        mark = self.learner.snapshot(check)
        handed_in = compute_delta(mark, self._trunk, self._known, check)
        self._marks[number] = mark
        for old in sorted(self._marks)[: -self._kept]:
            del self._marks[old]
        return handed_in

    def _merged_in(self, ref: DrafterBase) -> int:
        number, _ = ref.merged.get(self._name, (-1, 0))
        return number

    def _knows(self, ref: DrafterBase) -> bool:
        """Whether it has marked what of it the trunk has in it."""
        number = self._merged_in(ref)
        given_up = self.ref is not None and self.ref.root != ref.root
        return not given_up and (number <= self._merged or number in self._marks)
