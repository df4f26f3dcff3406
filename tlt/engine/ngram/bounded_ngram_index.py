"""The token indexes of all groups, kept within a memory budget.

Running rows, and whole answers from other engines, fill the index of their group. A row whose
tokens were dropped continues without proposals, which cost or save time but never change a token.
"""

from collections.abc import Hashable, Sequence
from itertools import count

from tlt.engine.ngram.group_token_index import GroupTokenIndex

# tokens that wait to be indexed, at most
_MOST_TOKENS = 200_000


class AnswerIndex:
    """Index the answers of running rows and of their groups within a budget of bytes."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._index = NgramIndex(budget)
        # tokens of each running row's answer that the index holds
        self._indexed: dict[Hashable, int] = {}
        self._waiting = WaitingAnswers()

    def add(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """Keep an answer that another engine decoded."""
        self._waiting.add(prompt, tokens)

    def begin(self, row: Hashable, prompt: Sequence[int]) -> int:
        """Index what has ended of the row's group, and return how much of its own is indexed."""
        group = group_of(prompt)
        for ended, answer in self._waiting.take(group):
            self._index.add(group, ended, answer)
        if row not in self._indexed:
            self._index.begin(row, prompt, group)
            self._indexed[row] = 0
        return self._indexed[row]

    def extend(self, row: Hashable, tokens: Sequence[int]) -> None:
        if tokens:
            self._index.extend(row, tokens)
            self._indexed[row] += len(tokens)

    def propose(self, row: Hashable, most: int) -> list[int]:
        return self._index.propose(row, most)

    def end(self, row: Hashable, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Keep the rest of an answer: its siblings may continue alike."""
        indexed = self._indexed.pop(row, None)
        if indexed is None:
            self._waiting.add(prompt, answer)
        else:
            self._index.extend(row, answer[indexed:])
            self._index.end(row)


class WaitingAnswers:
    """Ended answers by group; those of the oldest groups are dropped first."""

    def __init__(self) -> None:
        self._answers: dict[int, list[tuple[Sequence[int], Sequence[int]]]] = {}
        self._tokens = 0

    def add(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        self._answers.setdefault(group_of(prompt), []).append((prompt, tokens))
        self._tokens += len(tokens)
        while self._tokens > _MOST_TOKENS and len(self._answers) > 1:
            self.take(next(iter(self._answers)))

    def take(self, group: int) -> Sequence[tuple[Sequence[int], Sequence[int]]]:
        if not self._answers:
            return ()
        found = self._answers.pop(group, ())
        self._tokens -= sum(len(tokens) for _, tokens in found)
        return found


def group_of(prompt: Sequence[int]) -> int:
    """Identify a group by its prompt: answers of different steps help one another, too."""
    return hash(tuple(prompt))


class NgramIndex:
    def __init__(self, budget: int) -> None:
        """Keep at most `budget` bytes."""
        self.budget = budget
        # the least recently extended one comes first
        self._groups: dict[Hashable, GroupTokenIndex] = {}
        # by running row: its group, and the number of its sequence there
        self._rows: dict[Hashable, tuple[Hashable, int]] = {}
        self._numbers = count()
        self._bytes = 0

    @property
    def bytes(self) -> int:
        return self._bytes

    def begin(self, row: Hashable, prompt: Sequence[int], group: Hashable) -> None:
        """Add a row to a group, whose rows all answer this prompt."""
        number = next(self._numbers)
        self._rows[row] = group, number
        self._begin_sequence(group, number, prompt)
        self._shrink()

    def extend(self, row: Hashable, tokens: Sequence[int]) -> None:
        self._extend_sequence(*self._rows[row], tokens)

    def propose(self, row: Hashable, count: int) -> list[int]:
        """Propose at most `count` tokens that followed the same words."""
        group, number = self._rows[row]
        index = self._groups.get(group)
        if index is None or number not in index:
            return []
        return index.propose(number, count)

    def end(self, row: Hashable) -> None:
        del self._rows[row]

    def add(self, group: Hashable, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """Add a whole answer."""
        number = next(self._numbers)
        self._begin_sequence(group, number, prompt)
        self._extend_sequence(group, number, tokens)

    def _begin_sequence(self, group: Hashable, number: int, prompt: Sequence[int]) -> None:
        index = self._groups.get(group)
        if index is None:
            index = self._groups[group] = GroupTokenIndex(next(self._numbers), prompt)
            self._bytes += index.bytes
        before = index.bytes
        index.begin(number, prompt)
        self._bytes += index.bytes - before

    def _extend_sequence(self, group: Hashable, number: int, tokens: Sequence[int]) -> None:
        index = self._groups.get(group)
        if index is None or number not in index:
            return
        self._groups[group] = self._groups.pop(group)
        before = index.bytes
        index.extend(number, tokens)
        self._bytes += index.bytes - before
        self._shrink()

    def _shrink(self) -> None:
        """Drop groups without running rows, then the oldest answers of the largest group."""
        while self._bytes > self.budget:
            running = set(self._rows.values())
            groups = {group for group, _ in running}
            idle = next((group for group in self._groups if group not in groups), None)
            if idle is not None and len(self._groups) > 1:
                self._drop_group(idle)
                continue
            group = max(self._groups, key=lambda group: self._groups[group].bytes)
            index = self._groups[group]
            before = index.bytes
            index.drop_oldest({number for _, number in running})
            self._bytes += index.bytes - before
            if index.empty:
                self._drop_group(group)

    def _drop_group(self, group: Hashable) -> None:
        self._bytes -= self._groups.pop(group).bytes
