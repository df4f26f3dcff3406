"""What is held stays within the budget, and nobody needs to know what was dropped for it.

Running rows, and whole answers from elsewhere, fill the history of their group. A row whose tokens
were dropped goes on and proposes nothing. Proposals cost time or save it; they change no token.
"""

from collections.abc import Hashable, Sequence
from itertools import count

from tlt.engine.ngram.group_token_index import GroupTokenIndex, Proposal


class NgramIndex:
    def __init__(self, budget: int) -> None:
        """`budget` in bytes."""
        self.budget = budget
        # the one that was longest not written to comes first
        self._histories: dict[Hashable, GroupTokenIndex] = {}
        # by running row: its group, and its number in there
        self._rows: dict[int, tuple[Hashable, int]] = {}
        self._numbers = count()
        self._bytes = 0

    @property
    def bytes(self) -> int:
        return self._bytes

    def begin(self, row: int, prompt: Sequence[int], group: Hashable) -> None:
        """Rows of a group answer one prompt; what was begun before stays, running or ended."""
        number = next(self._numbers)
        self._rows[row] = group, number
        self._open(group, number, prompt)
        self._shrink()

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        self._write(*self._rows[row], tokens)

    def propose(self, row: int, count: int) -> Proposal:
        """At most so many tokens: as far as something has followed the same words."""
        group, number = self._rows[row]
        history = self._histories.get(group)
        if history is None or number not in history:
            return Proposal([], 0)
        return history.propose(number, count)

    def end(self, row: int) -> None:
        del self._rows[row]

    def add(self, group: Hashable, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """A whole answer, which was written elsewhere."""
        number = next(self._numbers)
        self._open(group, number, prompt)
        self._write(group, number, tokens)

    def forget(self, group: Hashable) -> None:
        if (history := self._histories.pop(group, None)) is not None:
            self._bytes -= history.bytes

    def _open(self, group: Hashable, number: int, prompt: Sequence[int]) -> None:
        history = self._histories.get(group)
        if history is None:
            history = self._histories[group] = GroupTokenIndex(next(self._numbers), prompt)
            self._bytes += history.bytes
        before = history.bytes
        history.begin(number, prompt)
        self._bytes += history.bytes - before

    def _write(self, group: Hashable, number: int, tokens: Sequence[int]) -> None:
        history = self._histories.get(group)
        if history is None or number not in history:
            return
        self._histories[group] = self._histories.pop(group)
        before = history.bytes
        history.extend(number, tokens)
        self._bytes += history.bytes - before
        self._shrink()

    def _shrink(self) -> None:
        """Drop groups that nobody runs in, then the oldest answers of the largest group."""
        while self._bytes > self.budget:
            running = set(self._rows.values())
            groups = {group for group, _ in running}
            idle = next((group for group in self._histories if group not in groups), None)
            if idle is not None and len(self._histories) > 1:
                self.forget(idle)
                continue
            group = max(self._histories, key=lambda group: self._histories[group].bytes)
            history = self._histories[group]
            before = history.bytes
            history.drop_oldest({number for _, number in running})
            self._bytes += history.bytes - before
            if history.empty:
                self.forget(group)
