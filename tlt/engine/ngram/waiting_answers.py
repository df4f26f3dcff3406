"""Index answers no earlier than they are looked up, so that other strategies cost nothing.

A running answer is indexed before a look-up, and one that has ended when its group runs again.
"""

from collections.abc import Hashable, Sequence

from tlt.engine.ngram.bounded_ngram_index import NgramIndex

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
