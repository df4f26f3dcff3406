"""N-grams of the rows that run: what they write is read into the index when somebody looks up."""

from collections.abc import Container, Sequence

import torch

from tlt.engine.native.running_batch import Row, RunningBatch
from tlt.engine.native.slot_tensors import SlotTensors
from tlt.engine.ngram import NgramIndex


class NgramProposer:
    def __init__(self, slots: SlotTensors, budget: int) -> None:
        self._slots = slots
        self._ngrams = NgramIndex(budget)
        # tokens of each row's answer that the index holds
        self._indexed: dict[int, int] = {}

    @property
    def budget(self) -> int:
        return self._ngrams.budget

    def propose(self, batch: RunningBatch, most: int) -> torch.Tensor | None:
        """Drafts [rows, some]; None if nothing has followed these words before."""
        # what its siblings have just written helps a row, too
        self.read(batch)
        found = [self._ngrams.propose(row.request.id, most).tokens for row in batch.rows]
        width = max(map(len, found))
        if width == 0:
            return None
        # a row that nothing is known of needs some token all the same
        padded = [tokens + [0] * (width - len(tokens)) for tokens in found]
        return torch.tensor(padded, device=self._slots.tokens.device)

    def read(self, batch: RunningBatch, but: Container[int] = ()) -> None:
        for index, (row, place) in enumerate(zip(batch.rows, batch.places, strict=True)):
            if row.request.id not in but:
                self._read(row, index, place)

    def read_to(self, row: Row) -> int:
        """The place of its last token that the index holds."""
        return len(row.request.prompt) + self._indexed.get(row.request.id, 0) - 1

    def guess(self, row: Row, index: int, place: int, most: int) -> list[int]:
        """What may follow this row's token there, where no later one was read."""
        self._read(row, index, place)
        return self._ngrams.propose(row.request.id, most).tokens

    def overhear(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """What was answered elsewhere."""
        self._ngrams.add(_group(prompt), prompt, tokens)

    def ended(self, row: Row, index: int, place: int) -> None:
        """Its siblings may go on as it did."""
        self._read(row, index, place)
        self._ngrams.end(row.request.id)
        del self._indexed[row.request.id]

    def _read(self, row: Row, index: int, place: int) -> None:
        request = row.request
        if request.id not in self._indexed:
            self._ngrams.begin(request.id, request.prompt, _group(request.prompt))
            self._indexed[request.id] = 0
        first = len(request.prompt) + self._indexed[request.id]
        tokens: list[int] = self._slots.tokens[index, first : place + 1].tolist()
        if tokens:
            self._ngrams.extend(request.id, tokens)
            self._indexed[request.id] += len(tokens)


def _group(prompt: Sequence[int]) -> int:
    """Answers to one prompt are siblings, whenever and for whatever step they were asked for."""
    return hash(tuple(prompt))
