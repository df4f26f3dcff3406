"""Make tiny random models and samples from a seed, the same in every process."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from tlt.kernels.training_kernels import load_kernels
from tlt.spec.config import AlgorithmSpec
from tlt.trainer.policy.model.micro_batches import Minibatch, PolicySample
from tlt.trainer.policy.policy_learner import PolicyLearner

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(load_kernels() is None, reason="no C compiler")
PATHS = ["padded", "packed", pytest.param("native", marks=needs_compiler)]
VOCABULARY = 24


def save_llama(folder: Path, seed: int = 0, **changes: Any) -> str:
    settings: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        # large enough for clearly different log-probs
        "initializer_range": 0.2,
    }
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**settings | changes)).save_pretrained(folder)
    return str(folder)


def save_mistral(folder: Path) -> str:
    torch.manual_seed(0)
    config = MistralConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=VOCABULARY,
        sliding_window=4,
        tie_word_embeddings=True,
        initializer_range=0.5,
    )
    MistralForCausalLM(config).save_pretrained(folder)
    return str(folder)


def save_family(folder: Path, family: str, **changes: Any) -> str:
    """Save a tiny model of a family that Transformers supports."""
    settings: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **settings | changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def spec(**changes: Any) -> AlgorithmSpec:
    settings: dict[str, Any] = {
        "steps": 10,
        "prompts_per_step": 2,
        "group_size": 2,
        "learning_rate": 1e-2,
        "microbatch_tokens": 64,
        "precision": "float32",
    }
    return AlgorithmSpec(**settings | changes)


def learner(folder: str, **changes: Any) -> PolicyLearner:
    return PolicyLearner(folder, spec(**changes), None, CPU)


def samples(count: int, seed: int = 0, temperature: float = 0.8) -> list[PolicySample]:
    rng = random.Random(seed)
    made: list[PolicySample] = []
    for _ in range(count):
        length = rng.randint(1, 20)
        made.append(
            PolicySample(
                prompt=tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 6))),
                completion=tuple(rng.randrange(VOCABULARY) for _ in range(length)),
                logprobs=tuple(-3.0 + rng.random() for _ in range(length)),
                temperature=temperature,
                advantage=rng.choice([-1.5, -0.5, 0.7, 1.2]),
            )
        )
    return made


def whole(chosen: list[PolicySample]) -> Minibatch:
    """Make a minibatch with all samples on one rank."""
    return share(chosen, chosen)


def share(mine: list[PolicySample], all_samples: list[PolicySample]) -> Minibatch:
    return Minibatch(
        samples=mine,
        total_tokens=sum(len(sample.completion) for sample in all_samples),
        total_sequences=len(all_samples),
    )


def never_interrupt() -> None:
    """Do nothing between micro-batches."""


def copies(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
