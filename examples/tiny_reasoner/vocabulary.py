"""Invariant: one token a character; ids 0..2 are <pad>, <eos>, <bos>, and ids never change.

<unk> exists only so that servers which warm up on English text do not fail.
"""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing

ALPHABET = "0123456789+=:,>;#"
PAD, EOS, BOS = 0, 1, 2
FIRST_CHARACTER = 3
UNK = FIRST_CHARACTER + len(ALPHABET)
VOCAB_SIZE = 32
MAX_POSITIONS = 1024

SPECIALS = {"<pad>": PAD, "<eos>": EOS, "<bos>": BOS, "<unk>": UNK}
CHARACTERS = {character: FIRST_CHARACTER + i for i, character in enumerate(ALPHABET)}


def encode(text: str) -> list[int]:
    """Return the ids of a text in the alphabet, without special tokens."""
    return [CHARACTERS[character] for character in text]


def decode(ids: list[int]) -> str:
    """Return the text of the ids without special and unused ones."""
    end = FIRST_CHARACTER + len(ALPHABET)
    return "".join(ALPHABET[i - FIRST_CHARACTER] for i in ids if FIRST_CHARACTER <= i < end)


def build_tokenizer() -> Tokenizer:
    """Return the same mapping as a `tokenizers` object, which also prepends <bos>."""
    tokenizer = Tokenizer(WordLevel({**SPECIALS, **CHARACTERS}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")  # pyright: ignore
    tokenizer.decoder = Fuse()  # pyright: ignore
    tokenizer.post_processor = TemplateProcessing(  # pyright: ignore
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
    )
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and the settings by which Transformers' AutoTokenizer finds it."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "bos_token": "<bos>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
