"""Find held-out prompts among training prompts: the same text, or 13 words in a row.

Case and white space don't count for the same text, nor punctuation for words. An instruction that
most prompts have is no leak, nor are words that many training prompts share.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from tlt.doctor.data_check.prompt_sets import SourcePrompt

_LEAK_WORDS = 13
# words in a row that make an instruction, if more than half of the held-out prompts have them
_INSTRUCTION_WORDS = 5
_MOST_TRAINING_PROMPTS = 10
_WORD = re.compile(r"\w+")


class Leak(NamedTuple):
    held_out: str
    trained: str


class ComparedPrompt:
    def __init__(self, prompt: SourcePrompt) -> None:
        self.location = prompt.location
        self.text = " ".join(prompt.text.casefold().split())
        self.words = _WORD.findall(self.text)

    @cached_property
    def grams(self) -> set[int]:
        """Return the hashes of all words in a row that may be a leak."""
        return set(_hashes(self.words, _LEAK_WORDS))


class HeldOutPrompts:
    """The prompts of one evaluation set, and where training prompts repeat them."""

    def __init__(self, key: str, prompts: Sequence[ComparedPrompt]) -> None:
        self.key = key
        self._by_text: defaultdict[str, list[str]] = defaultdict(list)
        self._by_gram: defaultdict[int, list[str]] = defaultdict(list)
        # training prompts that have a gram, and the first of them
        self._counts: Counter[int] = Counter()
        self._first: dict[int, str] = {}
        self._same: dict[str, str] = {}
        instruction = _instruction(prompts)
        for prompt in prompts:
            self._by_text[prompt.text].append(prompt.location)
            for gram in set(_own_grams(prompt.words, instruction)):
                self._by_gram[gram].append(prompt.location)

    def compare(self, trained: ComparedPrompt) -> None:
        for location in self._by_text.get(trained.text, ()):
            self._same.setdefault(location, trained.location)
        for gram in trained.grams & self._by_gram.keys():
            self._counts[gram] += 1
            self._first.setdefault(gram, trained.location)

    def same(self) -> list[Leak]:
        return [Leak(*found) for found in self._same.items()]

    def similar(self) -> list[Leak]:
        """Return prompts with words of a training prompt, beside those that are the same."""
        found: dict[str, str] = {}
        for gram, count in self._counts.items():
            if count <= _MOST_TRAINING_PROMPTS:
                for location in self._by_gram[gram]:
                    found.setdefault(location, self._first[gram])
        return [Leak(*pair) for pair in found.items() if pair[0] not in self._same]


def _instruction(prompts: Sequence[ComparedPrompt]) -> set[int]:
    """Return the hashes of the words in a row that most of the different prompts have."""
    different = {prompt.text: prompt.words for prompt in prompts}
    counts = Counter(
        gram for words in different.values() for gram in set(_hashes(words, _INSTRUCTION_WORDS))
    )
    return {gram for gram, count in counts.items() if count > max(1, len(different) / 2)}


def _own_grams(words: Sequence[str], instruction: set[int]) -> Iterator[int]:
    """Yield hashes of words in a row of which none belongs to the instruction."""
    own: list[str | None] = [*words]
    for at, gram in enumerate(_hashes(words, _INSTRUCTION_WORDS)):
        if gram in instruction:
            own[at : at + _INSTRUCTION_WORDS] = [None] * _INSTRUCTION_WORDS
    for at, gram in enumerate(_hashes(words, _LEAK_WORDS)):
        if None not in own[at : at + _LEAK_WORDS]:
            yield gram


def _hashes(words: Sequence[Hashable], length: int) -> Iterator[int]:
    for at in range(len(words) - length + 1):
        yield hash(tuple(words[at : at + length]))
