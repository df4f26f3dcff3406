"""Measure how many n-gram drafts would be accepted while other strategies decode.

Acceptance changes within a rollout: it is low while siblings run side by side, and highest once
most have ended. A look-up needs no pass, and the answer shows how much of it was right. As in real
n-gram steps, a proposal begins where the one before it would have ended: begun anywhere else,
proposals would meet long repetitions more often than real ones do.
"""

from typing import NamedTuple

from tlt.engine.native.ngram_proposer import NgramProposer
from tlt.engine.native.running_batch_tensors import Row, RunningBatch
from tlt.engine.native.slot_tensors import SlotTensors

# how many rows are followed, and after how many steps the other rows' tokens are indexed
_ROWS, _INDEX_STEPS = 2, 8
# proposals that are reported together
REPORTED_TOGETHER = 4


class _Proposal(NamedTuple):
    # position of the token before the first proposed one
    position: int
    tokens: list[int]


class DraftCounts(NamedTuple):
    """Counts by depth, as `StepObservation` defines them."""

    reached: list[int]
    accepted: list[int]


class NgramAcceptanceProbe:
    def __init__(self, ngrams: NgramProposer, slots: SlotTensors, most: int) -> None:
        """Propose up to `most` tokens at a time."""
        self._ngrams = ngrams
        self._slots = slots
        self._most = most
        # by followed row: the proposal whose outcome is still open
        self._open: dict[int, _Proposal] = {}
        self._steps = 0
        self._counts = self._new_counts()

    def observe(self, batch: RunningBatch) -> None:
        """Compare open proposals with what a step decoded."""
        self._steps += 1
        if self._steps % _INDEX_STEPS == 0:
            self._ngrams.index_rows(batch, but=self._open)
        for index, (row, position) in enumerate(zip(batch.rows, batch.last_positions, strict=True)):
            if row.request.id in self._open or len(self._open) < _ROWS:
                self._open[row.request.id] = self._follow(row, index, position)

    def handle_row_end(self, row: Row, index: int, position: int) -> None:
        if row.request.id in self._open:
            proposal = self._follow(row, index, position)
            accepted = self._accepted(proposal, index, position)
            self._count(accepted, position - proposal.position)
            del self._open[row.request.id]

    def take(self, least: int) -> DraftCounts | None:
        """Return the counts since the last call, or None of fewer than `least` proposals."""
        if self._counts.reached[0] < least:
            return None
        counts, self._counts = self._counts, self._new_counts()
        return counts

    def _follow(self, row: Row, index: int, position: int) -> _Proposal:
        """Count proposals up to a position, and return the first one whose outcome is open."""
        proposal = self._open.get(row.request.id) or self._propose(row, index, position)
        # the policy's own token follows the accepted ones
        while proposal.position + (n := self._accepted(proposal, index, position)) < position:
            self._count(n, position - proposal.position)
            proposal = self._propose(row, index, proposal.position + n + 1)
        return proposal

    def _propose(self, row: Row, index: int, position: int) -> _Proposal:
        # the index holds more of a row for which n-grams have decoded meanwhile
        position = max(position, self._ngrams.indexed_position(row))
        return _Proposal(position, self._ngrams.propose_row(row, index, position, self._most))

    def _accepted(self, proposal: _Proposal, index: int, position: int) -> int:
        """Return how many proposed tokens were decoded before the first that was not."""
        first, last = proposal.position, min(position, proposal.position + self._most)
        decoded: list[int] = self._slots.tokens[index, first + 1 : last + 1].tolist()
        pairs = enumerate(zip(proposal.tokens, decoded, strict=False))
        wrong = (at for at, (proposed, token) in pairs if proposed != token)
        return next(wrong, min(len(proposal.tokens), len(decoded)))

    def _count(self, accepted: int, decoded: int) -> None:
        for depth in range(min(accepted + 1, decoded, self._most)):
            self._counts.reached[depth] += 1
        for depth in range(accepted):
            self._counts.accepted[depth] += 1

    def _new_counts(self) -> DraftCounts:
        return DraftCounts([0] * self._most, [0] * self._most)
