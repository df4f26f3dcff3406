"""What n-grams would come to while others decode: they guess for a few rows, in thought.

How well they guess changes within a rollout: hardly at all while siblings run side by side, best
of all once most have ended. A look-up needs no pass, and the answer tells how far it was right.
As in their own rounds, a guess begins where the one before it would have ended: begun anywhere,
guesses would meet long repetitions more often than those rounds do.
"""

from typing import NamedTuple

from tlt.engine.native.batch import Batch, Row
from tlt.engine.native.lookup import Lookup
from tlt.engine.native.slots import Slots

# rows that are followed; of others it is read now and then what they wrote
_ROWS, _READ_ROUNDS = 2, 8
# guesses that are told of together
TOLD = 4


class _Guess(NamedTuple):
    # of the token before it
    place: int
    tokens: list[int]


class Judged(NamedTuple):
    """As `StrategyPolicy.observe` has it."""

    batch: int
    reached: list[int]
    accepted: list[int]


class Checks:
    def __init__(self, lookup: Lookup, slots: Slots, most: int) -> None:
        """Guesses of up to `most` tokens."""
        self._lookup = lookup
        self._slots = slots
        self._most = most
        # by row that is followed
        self._guesses: dict[int, _Guess] = {}
        self._rounds = self._batch = 0
        self._judged = self._nothing()

    def look(self, batch: Batch) -> None:
        """After a round."""
        self._rounds += 1
        self._batch = len(batch.rows)
        if self._rounds % _READ_ROUNDS == 0:
            self._lookup.read(batch)
        for index, (row, place) in enumerate(zip(batch.rows, batch.places, strict=True)):
            guess = self._guesses.get(row.request.id)
            if guess is None and len(self._guesses) >= _ROWS:
                continue
            if guess is None or self._judge(guess, index, place, over=False):
                tokens = self._lookup.guess(row, index, place, self._most)
                self._guesses[row.request.id] = _Guess(place, tokens)

    def ended(self, row: Row, index: int, place: int) -> None:
        guess = self._guesses.pop(row.request.id, None)
        if guess is not None:
            self._judge(guess, index, place, over=True)

    def taken(self, least: int) -> Judged | None:
        """Since something was last taken; None of fewer guesses."""
        if self._judged.reached[0] < least:
            return None
        judged, self._judged = self._judged, self._nothing()
        return judged._replace(batch=self._batch)

    def _judge(self, guess: _Guess, index: int, place: int, over: bool) -> bool:
        """Whether it is known how far it is right, or the row has ended."""
        last = min(place, guess.place + self._most)
        drawn: list[int] = self._slots.tokens[index, guess.place + 1 : last + 1].tolist()
        right = 0
        for guessed, token in zip(guess.tokens, drawn, strict=False):
            if guessed != token:
                break
            right += 1
        # the policy's own token after it is drawn
        if place <= guess.place + right and not over:
            return False
        for depth in range(min(right + 1, len(drawn))):
            self._judged.reached[depth] += 1
        for depth in range(right):
            self._judged.accepted[depth] += 1
        return True

    def _nothing(self) -> Judged:
        return Judged(self._batch, [0] * self._most, [0] * self._most)
