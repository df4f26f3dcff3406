"""Fixtures of one session that all tests share: two workers of two ranks, real Ray and Redis."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples.tiny_reasoner.vocabulary import BOS, EOS, PAD, VOCAB_SIZE, write_tokenizer
from tests.e2e.live import Live

WORKERS, RANKS = 2, 2


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("live")


@pytest.fixture(scope="session")
def live(home: Path) -> Iterator[Live]:
    session = Live(home)
    session.tlt(
        *("up", "--workers", str(WORKERS), "--ranks", str(RANKS)),
        *("--runs", str(session.runs), "--lease-seconds", "4"),
        seconds=240.0,
    )
    yield session
    session.tlt("down")


@pytest.fixture(scope="session")
def policy(home: Path) -> Path:
    return write_policy(home / "policy", layers=2)


def write_policy(folder: Path, layers: int, kv_heads: int = 1) -> Path:
    """Write a random model that never ends its answers early.

    One dimension carries a constant that no layer changes; it keeps the logit of the end token far
    below zero.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[EOS] = 0.0
        model.lm_head.weight[EOS, 0] = -10.0
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def raw_spec(home: Path, policy: Path) -> dict[str, Any]:
    """Return a job of seconds: short answers, and rewards that differ within a group."""
    rows = [{"prompt": f"{i:02d}+01=", "answer": str(i % 10)} for i in range(24)]
    data = home / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "name": "small",
        "policy": {"path": str(policy)},
        "data": {"train": str(data), "eval": str(data), "eval_limit": 8},
        "reward": {"kind": "regex", "pattern": r"(\d)\D*$"},
        "algorithm": {
            "steps": 2,
            "prompts_per_step": 4,
            "group_size": 8,
            "learning_rate": 1e-3,
            "minibatches": 2,
            "checkpoint_every": 2,
            "eval_every": 2,
            "collective_timeout_seconds": 30,
        },
        "rollout": {"max_new_tokens": 24, "slots": 4},
        "speculation": {"mode": "off"},
        "drafter": {"train": "off"},
        "seed": 3,
    }
