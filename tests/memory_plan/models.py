"""Make random models of given sizes on disk, and describe them to the planner."""

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tlt.memory_plan import JobMemory, ModelShape
from tlt.models.config_json import read_config
from tlt.ranks.job_sizes_from_spec import policy_shape

Family = Literal["qwen2", "qwen3"]
_CLASSES: dict[Family, tuple[Any, Any]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
POSITIONS = 1024


def save_policy(folder: Path, family: Family, **sizes: Any) -> Path:
    config, model = _CLASSES[family]
    settings: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 1000,
        "tie_word_embeddings": True,
        "max_position_embeddings": POSITIONS,
    }
    torch.manual_seed(0)
    model(config(**(settings | sizes))).save_pretrained(folder)
    return folder


def shape_of(folder: Path) -> ModelShape:
    return policy_shape(read_config(folder))


def job_of(policy: ModelShape, **changes: Any) -> JobMemory:
    settings: dict[str, Any] = {
        "engine": "native",
        "engine_width": 4,
        "slots": 4,
        "max_context": 256,
        "microbatch_tokens": 1024,
        "gradient_checkpointing": False,
        "bfloat16": False,
    }
    return JobMemory(policy=policy, **(settings | changes))
