"""Propose n-grams for the running rows."""

from collections.abc import Sequence

import torch

from tlt.engine.native.running_batch_tensors import Row, RunningBatch
from tlt.engine.native.slot_storage import SlotTensors
from tlt.engine.ngram.bounded_ngram_index import AnswerIndex


class NgramProposer:
    def __init__(self, slots: SlotTensors, budget: int) -> None:
        self._slots = slots
        self.index = AnswerIndex(budget)

    def propose(self, batch: RunningBatch, most: int) -> torch.Tensor | None:
        """Return drafts [rows, some], or None if nothing has followed any row's words before."""
        # all rows first: the newest tokens of its siblings help a row, too
        self._index_newest(batch)
        proposals = [self.index.propose(row.request.id, most) for row in batch.rows]
        width = max(map(len, proposals))
        if width == 0:
            return None
        padded = [tokens + [0] * (width - len(tokens)) for tokens in proposals]
        return torch.tensor(padded, device=self._slots.tokens.device)

    def handle_row_end(self, row: Row, tokens: Sequence[int]) -> None:
        self.index.end(row.request.id, row.request.prompt, tokens)

    def _index_newest(self, batch: RunningBatch) -> None:
        """Index the tokens that all rows have gained, which are read from the device at once."""
        parts: list[torch.Tensor] = []
        for index, (row, position) in enumerate(zip(batch.rows, batch.last_positions, strict=True)):
            prompt = row.request.prompt
            first = len(prompt) + self.index.begin(row.request.id, prompt)
            parts.append(self._slots.tokens[index, first : position + 1])
        tokens: list[int] = torch.cat(parts).tolist()
        for row, part in zip(batch.rows, parts, strict=True):
            gained, tokens = tokens[: len(part)], tokens[len(part) :]
            self.index.extend(row.request.id, gained)
