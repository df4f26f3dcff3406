"""Propose n-grams for the running rows.

Tokens are indexed only before a look-up, and answers that have ended only when their group runs
again, so that decoding with other strategies costs nothing.
"""

from collections.abc import Sequence

import torch

from tlt.engine.native.running_batch_tensors import Row, RunningBatch
from tlt.engine.native.slot_tensors import SlotTensors
from tlt.engine.ngram import NgramIndex
from tlt.engine.ngram.waiting_answers import WaitingAnswers, group_of


class NgramProposer:
    def __init__(self, slots: SlotTensors, budget: int) -> None:
        self._slots = slots
        self._index = NgramIndex(budget)
        # tokens of each row's answer that the index holds
        self._indexed: dict[int, int] = {}
        self._waiting = WaitingAnswers()

    @property
    def budget(self) -> int:
        return self._index.budget

    def propose(self, batch: RunningBatch, most: int) -> torch.Tensor | None:
        """Return drafts [rows, some], or None if nothing has followed any row's words before."""
        # all rows first: the newest tokens of its siblings help a row, too
        for row in batch.rows:
            self._begin_row(row)
        self._index_newest(batch)
        proposals = [self._index.propose(row.request.id, most).tokens for row in batch.rows]
        width = max(map(len, proposals))
        if width == 0:
            return None
        padded = [tokens + [0] * (width - len(tokens)) for tokens in proposals]
        return torch.tensor(padded, device=self._slots.tokens.device)

    def index_answer(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        self._waiting.add(prompt, tokens)

    def handle_row_end(self, row: Row, tokens: Sequence[int]) -> None:
        """Keep the rest of the answer: its siblings may continue alike."""
        request = row.request
        indexed = self._indexed.pop(request.id, None)
        if indexed is None:
            self._waiting.add(request.prompt, tokens)
        else:
            self._index.extend(request.id, tokens[indexed:])
            self._index.end(request.id)

    def _begin_row(self, row: Row) -> None:
        request = row.request
        group = group_of(request.prompt)
        for prompt, answer in self._waiting.take(group):
            self._index.add(group, prompt, answer)
        if request.id not in self._indexed:
            self._index.begin(request.id, request.prompt, group)
            self._indexed[request.id] = 0

    def _index_newest(self, batch: RunningBatch) -> None:
        """Index the tokens that all rows have gained, which are read from the device at once."""
        parts: list[torch.Tensor] = []
        for index, (row, position) in enumerate(zip(batch.rows, batch.last_positions, strict=True)):
            first = len(row.request.prompt) + self._indexed[row.request.id]
            parts.append(self._slots.tokens[index, first : position + 1])
        tokens: list[int] = torch.cat(parts).tolist()
        for row, part in zip(batch.rows, parts, strict=True):
            gained, tokens = tokens[: len(part)], tokens[len(part) :]
            if gained:
                self._index.extend(row.request.id, gained)
                self._indexed[row.request.id] += len(gained)
