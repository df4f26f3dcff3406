"""The running rows are the first ones of the slots, without gaps.

A row that ends is replaced from the queue, or else by the last row.
"""

from collections import deque
from time import perf_counter

import torch

from tlt.engine.base import Request
from tlt.engine.native.kept_prefixes import KeptPrefixes
from tlt.engine.native.prompt_prefill import PromptPrefiller
from tlt.engine.native.running_batch_tensors import Row, RunningBatch
from tlt.engine.native.slot_storage import SlotTensors


class RowTable:
    def __init__(self, count: int, max_context: int, slots: SlotTensors) -> None:
        self._count = count
        self._max_context = max_context
        self._slots = slots
        # None where a row has ended
        self.rows: list[Row | None] = []
        # derived from the rows; None after they changed
        self.batch: RunningBatch | None = None
        # decode steps so far
        self.step = 0
        self.kept = KeptPrefixes()
        # slot and position of rows that ended in the last step: their slots are still intact
        self.ended: dict[int, tuple[int, int]] = {}

    def admit(self, waiting: deque[Request], prefiller: PromptPrefiller) -> bool:
        """Fill free rows with the first waiting requests whose prompts are cached.

        Return True if a row was filled. A prompt's last token is decoded, not prefilled, so that
        all first tokens come out of a decode step like the others.
        """
        gaps = [index for index, row in enumerate(self.rows) if row is None]
        admitted = False
        while waiting and (gaps or len(self.rows) < self._count):
            prompt = waiting[0].prompt
            source = prefiller.row_of(prompt)
            if source is None and len(prompt) > 1:
                break
            if gaps:
                index = gaps.pop(0)
            else:
                index = len(self.rows)
                self.rows.append(None)
            self._make_way(index)
            if source is not None:
                self._slots.copy(source, index, len(prompt) - 1)
            self._slots.tokens[index, : len(prompt)] = torch.tensor(prompt)
            self.rows[index] = self._new_row(waiting.popleft())
            self.batch, admitted = None, True
        return admitted

    def close_gaps(self) -> list[tuple[Row, int, int]]:
        """Move last rows into gaps, and return each of them with its old and new slot."""
        moves: list[tuple[Row, int, int]] = []
        while None in self.rows:
            last = self.rows.pop()
            if last is None:
                continue
            gap, source = self.rows.index(None), len(self.rows)
            self._make_way(gap)
            self._slots.copy(source, gap, last.position(self.step) + 1)
            self.rows[gap] = last
            moves.append((last, source, gap))
        return moves

    def _make_way(self, index: int) -> None:
        """Move what an ended request has left in this slot to one that nothing uses, if any."""
        tokens = self.kept.take(index)
        if not tokens:
            return
        free = range(self._count - 1, len(self.rows), -1)
        spare = next((slot for slot in free if slot not in self.kept), None)
        if spare is None:
            spare = next((slot for slot in self.kept if slot in free), None)
        if spare is not None:
            self.kept.take(spare)
            self._slots.copy(index, spare, len(tokens))
            self.kept.put(spare, tokens)

    def remove(self, index: int) -> Row:
        row = self.rows[index]
        assert row is not None
        self.rows[index] = self.batch = None
        return row

    def clear(self) -> None:
        self.rows.clear()
        self.kept.restart(self.step)

    def find(self, id: int) -> tuple[int, Row] | None:
        for index, row in enumerate(self.rows):
            if row is not None and row.request.id == id:
                return index, row
        return None

    def locate_states(self, id: int) -> tuple[int, int]:
        """Return a running or just ended request's slot and how many positions it has cached."""
        if id in self.ended:
            return self.ended[id]
        if (running := self.find(id)) is None:
            raise KeyError(id)
        index, row = running
        return index, row.position(self.step)

    def _new_row(self, request: Request) -> Row:
        return Row(
            request=request,
            first_step=self.step,
            started=perf_counter(),
            limit=min(len(request.prompt) + request.max_new_tokens, self._max_context) - 1,
        )
