"""Render what follows a turn of the policy, by the chat template or as plain text.

A template renders whole conversations. What follows a turn is therefore what it writes behind a
marker that stands for that turn.
"""

from collections.abc import Sequence
from typing import Any

from tlt.data.thoughts import opens_thought
from tlt.errors import DataError
from tlt.models.tokenizer import Tokenizer
from tlt.spec.config import DataSpec

_WHERE = "environment"
# no template changes it, and no model writes it
_MARKER = "TLT-turn-of-the-policy-7c1e"


class TurnRenderer:
    def __init__(self, tokenizer: Tokenizer, data: DataSpec) -> None:
        self._tokenizer = tokenizer
        self._data = data
        self._stops = tokenizer.stop_tokens()
        # True if the policy's turns begin within a thought
        self.opens_thought = data.chat_template and opens_thought(
            tokenizer.prompt_text([{"role": "user", "content": "?"}], data, _WHERE)
        )

    def prompt(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], where: str
    ) -> tuple[int, ...]:
        """Tokenise a conversation that ends where the policy begins; raise DataError."""
        said: Any = messages if self._data.chat_template else _plain(messages)
        return self._tokenizer.prompt_tokens(said, self._data, where, tools or None)

    def require_known(self, tokens: Sequence[int]) -> None:
        """Raise DataError for a token that the tokenizer doesn't have."""
        if tokens and max(tokens) >= self._tokenizer.size:
            raise DataError(f"{max(tokens)} is no token of the policy's")

    def text(self, turn: Sequence[int]) -> str:
        """Return a turn's text with its special tokens, but for the one that ends it."""
        ended = len(turn) > 0 and turn[-1] in self._stops
        return self._tokenizer.decode_all(turn[:-1] if ended else turn)

    def following(self, messages: list[dict[str, Any]], before: Sequence[int]) -> tuple[int, ...]:
        """Tokenise the messages that follow these tokens, up to where the policy begins again."""
        if not self._data.chat_template:
            return self._tokenizer.tokens_within(_plain(messages))
        # some templates want a user's message first
        said = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": _MARKER},
            *messages,
        ]
        text = self._tokenizer.prompt_text(said, self._data, _WHERE)
        _, marker, rest = text.rpartition(_MARKER)
        if not marker:
            raise DataError(f"{_WHERE}: the chat template leaves out what the policy said")
        tokens = self._tokenizer.tokens_within(rest)
        # the policy has written the token that ends its turn, unless a stop string ended it
        return tokens[1:] if before and tokens and tokens[0] == before[-1] else tokens


def _plain(messages: list[dict[str, Any]]) -> str:
    return "".join(str(message["content"]) for message in messages)
