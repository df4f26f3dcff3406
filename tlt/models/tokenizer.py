"""Convert text to tokens and back with the tokenizer of the policy's folder."""

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tlt.data.dataset import conversation
from tlt.data.thoughts import TAGS
from tlt.errors import ConfigError, DataError
from tlt.spec.config import DataSpec


class Tokenizer:
    def __init__(self, folder: str) -> None:
        self.folder = folder
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError) as error:
            first_line = str(error).strip().splitlines()[0]
            raise ConfigError(f"{folder}: no tokenizer can be loaded: {first_line}") from error
        vocabulary = self._tokenizer.get_vocab()
        self.size = 1 + max(vocabulary.values())
        tags = {vocabulary[tag]: tag for tag in (*TAGS, *TAGS.values()) if tag in vocabulary}
        # a thought's tags that are special tokens
        self._tags = {token: tag for token, tag in tags.items() if not self._text([token])}

    def prompt_tokens(
        self, prompt: Any, spec: DataSpec, location: str, tools: Any = None
    ) -> tuple[int, ...]:
        """Tokenise a text or a list of messages, by the chat template if the spec says so."""
        return self.tokens_of(self.prompt_text(prompt, spec, location, tools), spec)

    def prompt_text(self, prompt: Any, spec: DataSpec, location: str, tools: Any = None) -> str:
        """Return a text as it is, or what the chat template makes of it or of messages."""
        if not spec.chat_template:
            if not isinstance(prompt, str):
                raise DataError(f"{location}: a list of messages needs data.chat_template: true")
            return prompt
        try:
            return self._tokenizer.apply_chat_template(
                conversation(prompt, spec),
                tools=tools,
                tokenize=False,
                add_generation_prompt=True,
                **spec.chat_template_kwargs,
            )
        except Exception as error:  # the template is a program that the model's authors wrote
            raise DataError(f"{location}: the chat template refuses it: {error}") from error

    def tokens_of(self, text: str, spec: DataSpec) -> tuple[int, ...]:
        """Tokenise a prompt's text; a chat template writes the special tokens itself."""
        special = not spec.chat_template
        return tuple(self._tokenizer(text, add_special_tokens=special)["input_ids"])

    def tokens_within(self, text: str) -> tuple[int, ...]:
        """Tokenise a text that follows others; it has the special tokens that it names, no more."""
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def answer_tokens(self, answer: str) -> tuple[int, ...]:
        """Tokenise a whole answer, and add the end token that the policy would give it."""
        ids = self.tokens_within(answer)
        end: int | None = self._tokenizer.eos_token_id
        return (*ids, min(self.stop_tokens()) if end is None else int(end))

    def decode(self, tokens: Sequence[int]) -> str:
        """Leave out special tokens, except those that are a thought's tags."""
        parts = groupby(tokens, key=self._tags.get) if self._tags else [(None, tokens)]
        return "".join(tag or self._text(list(part)) for tag, part in parts)

    def decode_all(self, tokens: Sequence[int]) -> str:
        """Keep special tokens: they may begin the call of a tool."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def stop_tokens(self) -> frozenset[int]:
        """Return the tokenizer's end-of-text token and those of the generation config."""
        stops: set[int] = set()
        if self._tokenizer.eos_token_id is not None:
            stops.add(int(self._tokenizer.eos_token_id))
        file = Path(self.folder) / "generation_config.json"
        if file.is_file():
            listed = json.loads(file.read_text()).get("eos_token_id")
            if listed is not None:
                stops.update(listed if isinstance(listed, list) else [listed])
        if not stops:
            raise ConfigError(f"{self.folder}: neither tokenizer nor generation config has an end")
        return frozenset(stops)
