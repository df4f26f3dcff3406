"""What n-grams would have guessed while others decode, held against what is drawn in the end.

They guess the better, the more siblings have ended: within a round, from hardly to best of all. A
look-up tells so without a pass, and without a row that waits for it.
"""

from collections import deque
from typing import NamedTuple

from tlt.engine.native.batch import Batch, Row
from tlt.engine.native.lookup import Lookup
from tlt.engine.native.slots import Slots

# every so many rounds so many rows: a hundredth of the rounds' time
_ROUNDS, _ROWS = 2, 4


class _Guess(NamedTuple):
    # of the token before it
    place: int
    tokens: list[int]


class Judged(NamedTuple):
    """As `StrategyPolicy.observe` has it."""

    reached: list[int]
    accepted: list[int]


class Checks:
    def __init__(self, lookup: Lookup, slots: Slots, most: int) -> None:
        """Guesses of up to `most` tokens."""
        self._lookup = lookup
        self._slots = slots
        self._most = most
        # by running row, the oldest first
        self._guesses: dict[int, deque[_Guess]] = {}
        self._rounds = self._next = 0
        self._judged = self._nothing()

    def look(self, batch: Batch) -> None:
        """After a round."""
        self._rounds += 1
        if self._rounds % _ROUNDS:
            return
        count = len(batch.rows)
        for turn in range(min(_ROWS, count)):
            index = (self._next + turn) % count
            row, place = batch.rows[index], batch.places[index]
            guesses = self._guesses.setdefault(row.request.id, deque())
            while guesses and place - guesses[0].place >= self._most:
                self._judge(guesses.popleft(), index, place)
            tokens = self._lookup.guess(row, index, place, self._most)
            guesses.append(_Guess(place, tokens))
        self._next = (self._next + _ROWS) % count

    def ended(self, row: Row, index: int, place: int) -> None:
        for guess in self._guesses.pop(row.request.id, ()):
            self._judge(guess, index, place)

    def taken(self) -> Judged:
        """Since it was last asked for."""
        judged, self._judged = self._judged, self._nothing()
        return judged

    def _judge(self, guess: _Guess, index: int, place: int) -> None:
        """Beyond the row's newest token there is nothing to agree with."""
        last = min(place, guess.place + self._most)
        drawn: list[int] = self._slots.tokens[index, guess.place + 1 : last + 1].tolist()
        for depth, token in enumerate(drawn):
            self._judged.reached[depth] += 1
            if depth >= len(guess.tokens) or guess.tokens[depth] != token:
                break
            self._judged.accepted[depth] += 1

    def _nothing(self) -> Judged:
        return Judged([0] * self._most, [0] * self._most)
