"""An answer's text in pieces, by how its tokens came about."""

import array
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

from tlt.protocol.events import RolloutFinished

# how the tokens of a piece came about, and its text
Pieces = tuple[tuple[str, str], ...]
# tokens before a piece that are decoded with it: some are written otherwise at the beginning
_CONTEXT = 4
# what stands for bytes that are no character yet, and how many of them may still become one
_INCOMPLETE = "\ufffd"
_MOST_INCOMPLETE = 4


class Tokens:
    def __init__(self, policy: Path) -> None:
        self._file = policy / "tokenizer.json"
        self._tokenizer: Any = None

    def pieces(self, answer: RolloutFinished) -> Pieces:
        """The text whole, in a piece of no known origin, where its tokens cannot be told apart."""
        ids = _ids(answer)
        if ids is None or not self._load():
            return (("", answer.text),)
        text = _Growing(self._decode, ids)
        ends = list(accumulate(span.tokens for span in answer.origins))
        pieces = [
            (span.origin, text.until(end)) for span, end in zip(answer.origins, ends, strict=True)
        ]
        return (*pieces, *([(pieces[-1][0], rest)] if pieces and (rest := text.rest()) else ()))

    def _load(self) -> bool:
        if self._tokenizer is None and self._file.is_file():
            # takes a moment and memory, which most who look need not spend
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(self._file))
        return self._tokenizer is not None

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""


class _Growing:
    """Text as its tokens come: a character is there with the one that completes it."""

    def __init__(self, decode: Callable[[list[int]], str], ids: list[int]) -> None:
        self._decode = decode
        self._ids = ids
        # the tokens that are decoded together, and what of their text was told
        self._first = self._end = 0
        self._told = ""

    def until(self, end: int) -> str:
        whole = self._decode(self._ids[self._first : end])
        complete = whole.rstrip(_INCOMPLETE)
        if len(whole) - len(complete) > _MOST_INCOMPLETE:
            complete = whole  # it is no character that will ever be whole
        piece = self._after_told(complete, end)
        self._told, self._end = complete, end
        if complete == whole:
            self._first = max(self._first, end - _CONTEXT)
            self._told = self._decode(self._ids[self._first : end])
        return piece

    def rest(self) -> str:
        """What no token completes."""
        return self._decode(self._ids[self._first : self._end])[len(self._told) :]

    def _after_told(self, text: str, end: int) -> str:
        if text.startswith(self._told):
            return text[len(self._told) :]
        return self._decode(self._ids[self._end : end])


def _ids(answer: RolloutFinished) -> list[int] | None:
    """None for those of a very long answer, which lie in a file that may be gone."""
    data = answer.tokens.data
    if data is None or answer.tokens.dtype != "int32":
        return None
    return array.array("i", data).tolist()
