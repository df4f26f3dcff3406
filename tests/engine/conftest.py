"""Random Llama models on disk, and every engine that must pass this suite."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engine.oracle import show
from tlt.engine.base import Engine
from tlt.engine.native import NativeEngine
from tlt.models.folder import load_llama
from tlt.types import PolicyVersion

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # wide enough for logits that differ
    "initializer_range": 0.15,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
MakeEngine = Callable[..., Engine]


def save_model(folder: Path, seed: int, **changes: Any) -> Path:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes}))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("policy"), seed=1)


@pytest.fixture(scope="session")
def next_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape, other weights."""
    return save_model(tmp_path_factory.mktemp("next"), seed=2)


@pytest.fixture(scope="session")
def odd_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything the other way: untied, one key-value head, heads wider than the model."""
    return save_model(
        tmp_path_factory.mktemp("odd"),
        seed=3,
        tie_word_embeddings=False,
        num_key_value_heads=1,
        head_dim=24,
        rms_norm_eps=0.1,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )


@pytest.fixture(params=["native"])
def make_engine(request: pytest.FixtureRequest) -> Iterator[MakeEngine]:
    engines: list[Engine] = []

    def make(
        folder: Path,
        slots: int = 4,
        max_context: int = 128,
        dtype: torch.dtype = torch.float64,
        decode_text: Callable[[Sequence[int]], str] = show,
    ) -> Engine:
        engine = NativeEngine(
            load_llama(folder, dtype),
            decode_text,
            slots,
            max_context,
            torch.device("cpu"),
            PolicyVersion(0),
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()
