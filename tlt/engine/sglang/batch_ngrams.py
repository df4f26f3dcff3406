"""Propose n-grams for the requests of an SGLang batch, from the index of the native engine.

Tokens are indexed only before a look-up. A request that ends is indexed whole when its group runs
again, because its siblings may continue alike.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tlt.engine.ngram import NgramIndex
from tlt.engine.ngram.waiting_answers import WaitingAnswers, group_of


class RunningText(NamedTuple):
    """A request's prompt, and its answer up to the newest token."""

    name: str
    prompt: Sequence[int]
    answer: Sequence[int]


class BatchNgrams:
    def __init__(self, budget: int) -> None:
        """Keep an index of at most `budget` bytes."""
        self._index = NgramIndex(budget)
        self._waiting = WaitingAnswers()
        # by request: its row in the index, and the tokens of its answer that the index holds
        self._rows: dict[str, tuple[int, int]] = {}
        self._next_row = 0

    def propose(self, texts: Iterable[RunningText], most: int) -> list[list[int]]:
        """Return proposals of at most `most` tokens each; none where nothing followed before."""
        found = list(texts)
        # all rows first: the newest tokens of its siblings help a row, too
        rows = [self._index_text(text) for text in found]
        return [self._index.propose(row, most).tokens for row in rows]

    def index_answer(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        self._waiting.add(prompt, tokens)

    def end(self, text: RunningText) -> None:
        """Keep the rest of an answer that has ended."""
        known = self._rows.pop(text.name, None)
        if known is None:
            self._waiting.add(text.prompt, text.answer)
            return
        row, indexed = known
        self._index.extend(row, text.answer[indexed:])
        self._index.end(row)

    def _index_text(self, text: RunningText) -> int:
        group = group_of(text.prompt)
        for prompt, answer in self._waiting.take(group):
            self._index.add(group, prompt, answer)
        if text.name not in self._rows:
            self._rows[text.name] = self._next_row, 0
            self._index.begin(self._next_row, text.prompt, group)
            self._next_row += 1
        row, indexed = self._rows[text.name]
        if len(text.answer) > indexed:
            self._index.extend(row, text.answer[indexed:])
            self._rows[text.name] = row, len(text.answer)
        return row
