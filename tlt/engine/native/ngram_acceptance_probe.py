"""What n-grams would come to while others decode: they guess for a few rows, in thought.

How well they guess changes within a rollout: hardly at all while siblings run side by side, best
of all once most have ended. A look-up needs no pass, and the answer tells how far it was right.
As in their own rounds, a guess begins where the one before it would have ended: begun anywhere,
or wherever rounds of others end, guesses would meet long repetitions more often than those do.
"""

from typing import NamedTuple

from tlt.engine.native.ngram_proposer import NgramProposer
from tlt.engine.native.running_batch import Row, RunningBatch
from tlt.engine.native.slot_tensors import SlotTensors

# rows that are followed; of others it is read now and then what they wrote
_ROWS, _READ_ROUNDS = 2, 8
# guesses that are told of together
TOLD = 4


class _Guess(NamedTuple):
    # of the token before it
    place: int
    tokens: list[int]


class DraftCounts(NamedTuple):
    """As `StrategyPolicy.observe` has it."""

    reached: list[int]
    accepted: list[int]


class NgramAcceptanceProbe:
    def __init__(self, lookup: NgramProposer, slots: SlotTensors, most: int) -> None:
        """Guesses of up to `most` tokens."""
        self._lookup = lookup
        self._slots = slots
        self._most = most
        # by row that is followed: what is not known yet to be right or wrong
        self._guesses: dict[int, _Guess] = {}
        self._rounds = 0
        self._judged = self._nothing()

    def look(self, batch: RunningBatch) -> None:
        """After a round."""
        self._rounds += 1
        if self._rounds % _READ_ROUNDS == 0:
            self._lookup.read(batch, but=self._guesses)
        for index, (row, place) in enumerate(zip(batch.rows, batch.places, strict=True)):
            if row.request.id in self._guesses or len(self._guesses) < _ROWS:
                self._guesses[row.request.id] = self._follow(row, index, place)

    def ended(self, row: Row, index: int, place: int) -> None:
        if row.request.id in self._guesses:
            guess = self._follow(row, index, place)
            self._judge(self._right(guess, index, place), place - guess.place)
            del self._guesses[row.request.id]

    def taken(self, least: int) -> DraftCounts | None:
        """Since something was last taken; None of fewer guesses."""
        if self._judged.reached[0] < least:
            return None
        count_drafts, self._judged = self._judged, self._nothing()
        return count_drafts

    def _follow(self, row: Row, index: int, place: int) -> _Guess:
        """To the first guess of which it is not known yet how far it is right."""
        guess = self._guesses.get(row.request.id) or self._guess(row, index, place)
        # the policy's own token after it is drawn
        while guess.place + (right := self._right(guess, index, place)) < place:
            self._judge(right, place - guess.place)
            guess = self._guess(row, index, guess.place + right + 1)
        return guess

    def _guess(self, row: Row, index: int, place: int) -> _Guess:
        # of a row that n-grams have decoded meanwhile the index holds more
        place = max(place, self._lookup.read_to(row))
        return _Guess(place, self._lookup.guess(row, index, place, self._most))

    def _right(self, guess: _Guess, index: int, place: int) -> int:
        """How many of its tokens were drawn, one after the other."""
        last = min(place, guess.place + self._most)
        drawn: list[int] = self._slots.tokens[index, guess.place + 1 : last + 1].tolist()
        pairs = enumerate(zip(guess.tokens, drawn, strict=False))
        wrong = (at for at, (guessed, token) in pairs if guessed != token)
        return next(wrong, min(len(guess.tokens), len(drawn)))

    def _judge(self, right: int, drawn: int) -> None:
        for depth in range(min(right + 1, drawn, self._most)):
            self._judged.reached[depth] += 1
        for depth in range(right):
            self._judged.accepted[depth] += 1

    def _nothing(self) -> DraftCounts:
        return DraftCounts([0] * self._most, [0] * self._most)
