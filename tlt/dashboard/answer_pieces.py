"""The text of an answer, split by the origin of its tokens."""

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

from tlt.blobs.answer_files import Answer

# the origin of a piece's tokens, and its text
Pieces = tuple[tuple[str, str], ...]
# tokens before a piece that are decoded with it: some have another text at the beginning
_CONTEXT = 4
# stands for bytes that are no character yet, and how many of them may still become one
_INCOMPLETE = "\ufffd"
_MOST_INCOMPLETE = 4


class PieceDecoder:
    def __init__(self, policy: Path) -> None:
        self._file = policy / "tokenizer.json"
        self._tokenizer: Any = None

    def pieces(self, answer: Answer) -> Pieces:
        """Return the pieces, or the whole text as one where there is no tokenizer."""
        if not self._load():
            return (("", answer.text),)
        text = _IncrementalText(self._decode, answer.tokens)
        ends = list(accumulate(span.tokens for span in answer.origins))
        pieces = [
            (span.origin, text.until(end)) for span, end in zip(answer.origins, ends, strict=True)
        ]
        return (*pieces, *([(pieces[-1][0], rest)] if pieces and (rest := text.rest()) else ()))

    def _load(self) -> bool:
        if self._tokenizer is None and self._file.is_file():
            # imported late: it takes time and memory that most pages don't need
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(self._file))
        return self._tokenizer is not None

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""


class _IncrementalText:
    """Decodes tokens piece by piece; a character belongs to the token that completes it."""

    def __init__(self, decode: Callable[[list[int]], str], ids: list[int]) -> None:
        self._decode = decode
        self._ids = ids
        # the tokens that are decoded together, and the part of their text that was returned
        self._first = self._end = 0
        self._returned = ""

    def until(self, end: int) -> str:
        whole = self._decode(self._ids[self._first : end])
        complete = whole.rstrip(_INCOMPLETE)
        if len(whole) - len(complete) > _MOST_INCOMPLETE:
            complete = whole  # these bytes will never become a character
        piece = self._new_part(complete, end)
        self._returned, self._end = complete, end
        if complete == whole:
            self._first = max(self._first, end - _CONTEXT)
            self._returned = self._decode(self._ids[self._first : end])
        return piece

    def rest(self) -> str:
        """Return the bytes at the end that no token completes."""
        return self._decode(self._ids[self._first : self._end])[len(self._returned) :]

    def _new_part(self, text: str, end: int) -> str:
        if text.startswith(self._returned):
            return text[len(self._returned) :]
        return self._decode(self._ids[self._end : end])
