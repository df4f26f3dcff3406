"""Hold ended answers until their group runs again: an index of them would cost time before."""

from collections.abc import Sequence

# tokens that wait to be indexed, at most
_MOST_TOKENS = 200_000


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
