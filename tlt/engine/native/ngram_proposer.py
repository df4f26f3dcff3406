"""Propose n-grams for the running rows; their new tokens are indexed only before a look-up."""

from collections.abc import Container, Sequence

import torch

from tlt.engine.native.running_batch_tensors import Row, RunningBatch
from tlt.engine.native.slot_tensors import SlotTensors
from tlt.engine.ngram import NgramIndex


class NgramProposer:
    def __init__(self, slots: SlotTensors, budget: int) -> None:
        self._slots = slots
        self._index = NgramIndex(budget)
        # tokens of each row's answer that the index holds
        self._indexed: dict[int, int] = {}

    @property
    def budget(self) -> int:
        return self._index.budget

    def propose(self, batch: RunningBatch, most: int) -> torch.Tensor | None:
        """Return drafts [rows, some], or None if nothing has followed any row's words before."""
        # all rows first: the newest tokens of its siblings help a row, too
        self.index_rows(batch)
        proposals = [self._index.propose(row.request.id, most).tokens for row in batch.rows]
        width = max(map(len, proposals))
        if width == 0:
            return None
        padded = [tokens + [0] * (width - len(tokens)) for tokens in proposals]
        return torch.tensor(padded, device=self._slots.tokens.device)

    def index_rows(self, batch: RunningBatch, but: Container[int] = ()) -> None:
        for index, (row, position) in enumerate(zip(batch.rows, batch.last_positions, strict=True)):
            if row.request.id not in but:
                self._index_row(row, index, position)

    def indexed_position(self, row: Row) -> int:
        """Return the position of the row's last token that the index holds."""
        return len(row.request.prompt) + self._indexed.get(row.request.id, 0) - 1

    def propose_row(self, row: Row, index: int, position: int, most: int) -> list[int]:
        """Propose what follows this row's token at a position; later tokens are not indexed yet."""
        self._index_row(row, index, position)
        return self._index.propose(row.request.id, most).tokens

    def index_answer(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        self._index.add(_group(prompt), prompt, tokens)

    def handle_row_end(self, row: Row, index: int, position: int) -> None:
        """Index the rest of the answer: its siblings may continue alike."""
        self._index_row(row, index, position)
        self._index.end(row.request.id)
        del self._indexed[row.request.id]

    def _index_row(self, row: Row, index: int, position: int) -> None:
        request = row.request
        if request.id not in self._indexed:
            self._index.begin(request.id, request.prompt, _group(request.prompt))
            self._indexed[request.id] = 0
        first = len(request.prompt) + self._indexed[request.id]
        tokens: list[int] = self._slots.tokens[index, first : position + 1].tolist()
        if tokens:
            self._index.extend(request.id, tokens)
            self._indexed[request.id] += len(tokens)


def _group(prompt: Sequence[int]) -> int:
    """Identify a group by its prompt: answers of different steps help one another, too."""
    return hash(tuple(prompt))
