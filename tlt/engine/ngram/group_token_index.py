"""Every token of one group is found by the words before it, in the newest places first.

These are LZ77's hash chains. For each length of context a table of buckets knows the newest place
that such a context led to; every place knows the one before it in its bucket. Different contexts
share buckets, so whoever follows a chain compares tokens. A chain ends where a sequence was
dropped: what lies behind it is older still.
"""

from array import array
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple
from zlib import crc32

# Tried in turn. All of 24 to 2 accept 3 % more, and cost five times as much.
CONTEXTS = (8, 4, 2)
LONGEST = CONTEXTS[0]
_VOTERS = 8
# How far a chain is followed, strangers in the bucket included
_STEPS = 24
# At first
_BUCKETS = 64
_TOKENS_PER_BUCKET = 2
_NOWHERE = -1
# As tracemalloc sees them, arrays with the room that they grow by
_HISTORY_BYTES = 1000
_SEQUENCE_BYTES = 700
_BUCKET_BYTES = 8 * len(CONTEXTS)
_TOKEN_BYTES = 29
# A place is a sequence's number and, in the low bits, where in it
_OFFSET_BITS = 32
_OFFSETS = (1 << _OFFSET_BITS) - 1
# Before a prompt's first token: no vocabulary has it
_PADDING = -1


class Proposal(NamedTuple):
    tokens: list[int]
    # the length of the context that they were found by, which says how far to trust them; 0 if none
    matched: int


@dataclass(slots=True)
class _Written:
    # the end of the prompt, for context, then what followed it
    tokens: "array[int]"
    # by length of context and token that followed the prompt: the place before in its bucket
    links: "tuple[array[int], ...]"


class GroupTokenIndex:
    def __init__(self, number: int, prompt: Sequence[int]) -> None:
        """Numbers are never used twice; this one is the prompt's own."""
        self._written: dict[int, _Written] = {}
        self._tables = tuple(array("q", [_NOWHERE]) * _BUCKETS for _ in CONTEXTS)
        self._mask = _BUCKETS - 1
        self._tokens = 0
        self.begin(number, ())
        self.extend(number, prompt)

    def __contains__(self, number: int) -> bool:
        return number in self._written

    @property
    def empty(self) -> bool:
        return not self._written

    @property
    def bytes(self) -> int:
        return (
            _HISTORY_BYTES
            + _BUCKET_BYTES * (self._mask + 1)
            + _SEQUENCE_BYTES * len(self._written)
            + _TOKEN_BYTES * self._tokens
        )

    def begin(self, number: int, prompt: Sequence[int]) -> None:
        before = [_PADDING] * (LONGEST - len(prompt)) + list(prompt[-LONGEST:])
        self._written[number] = _Written(array("i", before), tuple(array("q") for _ in CONTEXTS))

    def extend(self, number: int, tokens: Sequence[int]) -> None:
        written, links = self._written[number].tokens, self._written[number].links
        self._make_room(len(tokens))
        chains = list(zip(CONTEXTS, self._tables, links, strict=True))
        mask = self._mask
        place = number << _OFFSET_BITS | len(written)
        for token in tokens:
            for length, table, link in chains:
                bucket = crc32(written[-length:]) & mask
                link.append(table[bucket])
                table[bucket] = place
            written.append(token)
            place += 1

    def propose(self, number: int, count: int) -> Proposal:
        """The longest context that is known wins; among its newest places each token's majority."""
        written = self._written[number].tokens
        for order, length in enumerate(CONTEXTS):
            if found := self._after(written[-length:], order, count):
                return Proposal(_voted(found), length)
        return Proposal([], 0)

    def drop_oldest(self, running: Set[int]) -> None:
        """Those that still run go last."""
        oldest = next((number for number in self._written if number not in running), None)
        dropped = self._written.pop(next(iter(self._written)) if oldest is None else oldest)
        self._tokens -= len(dropped.tokens) - LONGEST

    def _after(self, context: "array[int]", order: int, count: int) -> "list[array[int]]":
        found: list[array[int]] = []
        place = self._tables[order][crc32(context) & self._mask]
        for _ in range(_STEPS):
            written = self._written.get(place >> _OFFSET_BITS)
            if written is None:
                break
            start = place & _OFFSETS
            if written.tokens[start - len(context) : start] == context:
                found.append(written.tokens[start : start + count])
                if len(found) == _VOTERS:
                    break
            place = written.links[order][start - LONGEST]
        return found

    def _make_room(self, tokens: int) -> None:
        """Twice the buckets: each new one starts with the chain of the old one that it halves."""
        self._tokens += tokens
        while self._tokens > _TOKENS_PER_BUCKET * (self._mask + 1):
            for table in self._tables:
                table.extend(table)
            self._mask = 2 * self._mask + 1


def _voted(found: "Sequence[array[int]]") -> list[int]:
    """Token by token what most say, the newest among equals; who said otherwise is out."""
    voices = [voice.tolist() for voice in found]
    said: list[int] = []
    for at in range(max(map(len, voices))):
        votes = [voice[at] for voice in voices if at < len(voice)]
        if not votes:
            break
        winner = votes[0]
        if votes.count(winner) < len(votes):
            winner = max(votes, key=votes.count)
            voices = [voice for voice in voices if at < len(voice) and voice[at] == winner]
        said.append(winner)
    return said
