"""Write policies with random weights in Qwen2's shapes, and jobs for them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Config, Qwen2ForCausalLM

from tlt.models.decoder_spec import DecoderConfig
from tlt.models.eagle_drafter import Drafter
from tlt.trainer.drafter.initial_drafter import drafter_config_for, initialise_drafter

_SPECIALS = ("<pad>", "<bos>", "<eos>")


class Sizes(NamedTuple):
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int = 151_936


TINY = Sizes(hidden=64, intermediate=128, layers=4, heads=4, kv_heads=2, vocabulary=600)
# of Qwen2.5-0.5B and Qwen2.5-1.5B
HALF_BILLION = Sizes(hidden=896, intermediate=4864, layers=24, heads=14, kv_heads=2)
ONE_AND_A_HALF_BILLION = Sizes(hidden=1536, intermediate=8960, layers=28, heads=12, kv_heads=2)
# two of the layers of Qwen3-8B: a drafter depends on the width alone
WIDE = Sizes(hidden=4096, intermediate=12_288, layers=2, heads=32, kv_heads=8)


def write_policy(
    folder: Path,
    sizes: Sizes,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> int:
    """Write a policy, made on the device, and its tokenizer; return the number of weights."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.device(device or "cpu"):
        model = Qwen2ForCausalLM(config).to(dtype)  # pyright: ignore
    model.save_pretrained(folder)
    _write_tokenizer(folder, sizes.vocabulary)
    return sum(parameter.numel() for parameter in model.parameters())


def random_drafter(policy: DecoderConfig, seed: int) -> Drafter:
    config = drafter_config_for(policy, "eagle")
    return initialise_drafter(config, torch.ones(2 * config.hidden), seed)


def _write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer with a token for each byte, and words for the rest of the vocabulary."""
    known = [*_SPECIALS, *sorted(ByteLevel.alphabet())]
    words = [*known, *(f"w{number}" for number in range(len(known), vocabulary))]
    tokenizer = Tokenizer(BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {f"{word[1:-1]}_token": word for word in _SPECIALS}
    text = json.dumps({"tokenizer_class": "Qwen2Tokenizer", **settings})
    (folder / "tokenizer_config.json").write_text(text)


# 1 for an odd number of characters, else 0
COIN = "def coin(completion, **_):\n    return float(len(completion) % 2)\n"


def write_job(folder: Path, name: str, reward: str = COIN, **parts: dict[str, Any]) -> Path:
    """Write the spec of a job for the policy in `folder`; `reward` is the source of `coin`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "coin.py").write_text(reward)
    prompts: Sequence[str] = [f"{i:02d}+" * 13 for i in range(8)]
    rows = "".join(json.dumps({"prompt": prompt, "answer": ""}) + "\n" for prompt in prompts)
    (folder / "data.jsonl").write_text(rows)
    spec: dict[str, Any] = {
        "name": name,
        "policy": {"path": "policy"},
        "data": {"train": "data.jsonl"},
        "reward": {"kind": "function", "function": "coin.py:coin"},
    }
    for part, settings in parts.items():
        spec[part] = spec.get(part, {}) | settings
    path = folder / "job.json"
    path.write_text(json.dumps(spec))
    return path
