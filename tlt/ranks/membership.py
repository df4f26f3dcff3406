"""One learner among those that make a drafter: what of it is in a trunk, and what isn't yet.

Whatever was learned is added to the lineage of trunks once: a delta holds all that no trunk held
when it was handed in, and once a trunk has it, the learner counts from there.
"""

from tlt.learn.drafter.learner import DrafterLearner
from tlt.learn.drafter.merging import Delta, Mark, Trunk, delta, rebased
from tlt.messages import TrunkRef

# deltas whose mark is kept: a merge takes no longer than a few of them
_MARKS = 16


class Membership:
    def __init__(self, name: str, learner: DrafterLearner) -> None:
        self.learner = learner
        mark = learner.mark()
        # where it began: about there, all that have the same seed
        self.root = Trunk(tensors=mark.tensors, updates=mark.updates, lessons=0)
        self.ref: TrunkRef | None = None
        self._name = name
        self._trunk = self.root
        # lessons of the first trunk that had this member's last delta in it
        self._known = 0
        # where the learner was when it handed in a delta that may not be in a trunk yet
        self._marks: dict[int, Mark] = {}
        self._merged = -1

    def stand_on(self, ref: TrunkRef, trunk: Trunk) -> None:
        since = self._since(ref)
        if self.learner.updates == since.updates:
            self._known = trunk.lessons  # it begins from there
        elif since is not self._trunk:
            self._known = ref.merged[self._name][1]
        self.learner.rebase(since, trunk)
        self._marks = {n: rebased(mark, since, trunk) for n, mark in self._marks.items()}
        self._trunk, self.ref = trunk, ref

    def hand_in(self, number: int) -> Delta:
        mark = self.learner.mark()
        self._marks[number] = mark
        for old in sorted(self._marks)[:-_MARKS]:
            del self._marks[old]
        return delta(mark, self._trunk, self._known)

    def _since(self, ref: TrunkRef) -> Mark:
        """What of the learner the trunk has in it, or was given up."""
        given_up = self.ref is not None and self.ref.root != ref.root
        number, _ = ref.merged.get(self._name, (-1, 0))
        if given_up or (number > self._merged and number not in self._marks):
            self._marks.clear()
            self._merged = max(self._merged, number)
            return self.learner.mark()
        if number <= self._merged:
            return self._trunk
        self._merged = number
        since = self._marks[number]
        self._marks = {n: mark for n, mark in self._marks.items() if n > number}
        return since
