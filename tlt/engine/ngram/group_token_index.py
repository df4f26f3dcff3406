"""Find the tokens of one group by the words before them, newest occurrences first.

These are LZ77's hash chains. For each context length, a table of buckets holds the newest location
that follows such a context, and every location links to the one before it in its bucket. Different
contexts share buckets, so a search compares tokens. A chain ends at a sequence that was dropped:
everything behind it is older.
"""

from array import array
from collections.abc import Sequence, Set
from dataclasses import dataclass
from zlib import crc32

# context lengths, tried in turn: all of 24 to 2 accept 3 % more and cost five times as much
CONTEXTS = (8, 4, 2)
LONGEST = CONTEXTS[0]
# occurrences that vote on a proposal
_VOTERS = 8
# links of a chain that are followed, those of other contexts in the bucket included
MAX_CHAIN_LINKS = 24
# buckets of a new table
_BUCKETS = 64
_TOKENS_PER_BUCKET = 2
_NOWHERE = -1
# sizes as tracemalloc sees them, including the room that arrays grow by
_HISTORY_BYTES = 1000
_SEQUENCE_BYTES = 700
_BUCKET_BYTES = 8 * len(CONTEXTS)
_TOKEN_BYTES = 29
# a location is a sequence's number and, in the low bits, the offset in it
_OFFSET_BITS = 32
_OFFSETS = (1 << _OFFSET_BITS) - 1
# before a prompt's first token: no vocabulary has it
_PADDING = -1


@dataclass(slots=True)
class _TokenSequence:
    # the end of the prompt, as context, then the tokens after it
    tokens: "array[int]"
    # by context length and token after the prompt: the location before it in its bucket
    links: "tuple[array[int], ...]"


class GroupTokenIndex:
    def __init__(self, number: int, prompt: Sequence[int]) -> None:
        """Index the prompt as the sequence `number`; numbers are never used twice."""
        self._sequences: dict[int, _TokenSequence] = {}
        self._tables = tuple(array("q", [_NOWHERE]) * _BUCKETS for _ in CONTEXTS)
        self._mask = _BUCKETS - 1
        self._tokens = 0
        self.begin(number, ())
        self.extend(number, prompt)

    def __contains__(self, number: int) -> bool:
        return number in self._sequences

    @property
    def empty(self) -> bool:
        return not self._sequences

    @property
    def bytes(self) -> int:
        return (
            _HISTORY_BYTES
            + _BUCKET_BYTES * (self._mask + 1)
            + _SEQUENCE_BYTES * len(self._sequences)
            + _TOKEN_BYTES * self._tokens
        )

    def begin(self, number: int, prompt: Sequence[int]) -> None:
        before = [_PADDING] * (LONGEST - len(prompt)) + list(prompt[-LONGEST:])
        self._sequences[number] = _TokenSequence(
            array("i", before), tuple(array("q") for _ in CONTEXTS)
        )

    def extend(self, number: int, tokens: Sequence[int]) -> None:
        sequence = self._sequences[number]
        written, links = sequence.tokens, sequence.links
        self._make_room(len(tokens))
        chains = list(zip(CONTEXTS, self._tables, links, strict=True))
        mask = self._mask
        location = number << _OFFSET_BITS | len(written)
        for token in tokens:
            for length, table, link in chains:
                bucket = crc32(written[-length:]) & mask
                link.append(table[bucket])
                table[bucket] = location
            written.append(token)
            location += 1

    def propose(self, number: int, count: int) -> list[int]:
        """Propose what the newest occurrences of the longest known context agree on by majority."""
        written = self._sequences[number].tokens
        for order, length in enumerate(CONTEXTS):
            if occurrences := self._find(written[-length:], order, count):
                return _majority(occurrences)
        return []

    def drop_oldest(self, running: Set[int]) -> None:
        """Drop the oldest sequence, preferring those that don't run."""
        oldest = next((number for number in self._sequences if number not in running), None)
        dropped = self._sequences.pop(next(iter(self._sequences)) if oldest is None else oldest)
        self._tokens -= len(dropped.tokens) - LONGEST

    def _find(self, context: "array[int]", order: int, count: int) -> "list[array[int]]":
        occurrences: list[array[int]] = []
        location = self._tables[order][crc32(context) & self._mask]
        for _ in range(MAX_CHAIN_LINKS):
            sequence = self._sequences.get(location >> _OFFSET_BITS)
            if sequence is None:
                break
            start = location & _OFFSETS
            if sequence.tokens[start - len(context) : start] == context:
                occurrences.append(sequence.tokens[start : start + count])
                if len(occurrences) == _VOTERS:
                    break
            location = sequence.links[order][start - LONGEST]
        return occurrences

    def _make_room(self, tokens: int) -> None:
        """Double the buckets as needed; each new one starts with the chain of the one it halves."""
        self._tokens += tokens
        while self._tokens > _TOKENS_PER_BUCKET * (self._mask + 1):
            for table in self._tables:
                table.extend(table)
            self._mask = 2 * self._mask + 1


def _majority(occurrences: "Sequence[array[int]]") -> list[int]:
    """Choose each token by majority, the newest among equals, and drop the minority's votes."""
    voters = [occurrence.tolist() for occurrence in occurrences]
    tokens: list[int] = []
    for at in range(max(map(len, voters))):
        votes = [voter[at] for voter in voters if at < len(voter)]
        if not votes:
            break
        winner = votes[0]
        if votes.count(winner) < len(votes):
            winner = max(votes, key=votes.count)
            voters = [voter for voter in voters if at < len(voter) and voter[at] == winner]
        tokens.append(winner)
    return tokens
