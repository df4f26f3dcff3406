"""An answer's text in pieces, by how its tokens came about."""

import array
from pathlib import Path
from typing import Any

from tlt.messages import RolloutFinished

# how the tokens of a piece came about, and its text
Pieces = tuple[tuple[str, str], ...]
# tokens before a piece that are decoded with it: a character may need several
_CONTEXT = 4


class Tokens:
    def __init__(self, policy: Path) -> None:
        self._file = policy / "tokenizer.json"
        self._tokenizer: Any = None

    def pieces(self, answer: RolloutFinished) -> Pieces:
        """The text whole, in a piece of no known origin, where its tokens cannot be told apart."""
        ids = _ids(answer)
        if ids is None or not self._load():
            return (("", answer.text),)
        pieces: list[tuple[str, str]] = []
        begin = 0
        for span in answer.origins:
            pieces.append((span.origin, self._text(ids, begin, begin + span.tokens)))
            begin += span.tokens
        return tuple(pieces)

    def _load(self) -> bool:
        if self._tokenizer is None and self._file.is_file():
            # takes a moment and memory, which most who look need not spend
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(self._file))
        return self._tokenizer is not None

    def _text(self, ids: list[int], begin: int, end: int) -> str:
        first = max(0, begin - _CONTEXT)
        before = self._decode(ids[first:begin])
        whole = self._decode(ids[first:end])
        return whole[len(before) :] if whole.startswith(before) else self._decode(ids[begin:end])

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""


def _ids(answer: RolloutFinished) -> list[int] | None:
    """None for those of a very long answer, which lie in a file that may be gone."""
    data = answer.tokens.data
    if data is None or answer.tokens.dtype != "int32":
        return None
    return array.array("i", data).tolist()
