"""Fixtures of random models on disk and of every engine that must pass this suite."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.engine.reference import drain, show
from tests.engine.servers import Servers
from tlt.base.id_types import PolicyVersion
from tlt.engine.base import Engine
from tlt.engine.native import NativeEngine
from tlt.models.decoder_from_folder import load_decoder

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # wide enough for clearly different logits
    "initializer_range": 0.15,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
MakeEngine = Callable[..., Engine]


_CLASSES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
# Together these models cover every supported architecture variant.
POLICIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama the other way": {
        "tie_word_embeddings": False,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "rms_norm_eps": 0.1,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0},
    },
    "llama, its own rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 100.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "qwen2 with yarn": {
        "family": "qwen2",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen3": {"family": "qwen3", "head_dim": 24},
    "qwen3 with biases": {"family": "qwen3", "attention_bias": True, "tie_word_embeddings": False},
}


def save_model(folder: Path, seed: int, family: str = "llama", **changes: Any) -> Path:
    torch.manual_seed(seed)
    config, model_class = _CLASSES[family]
    model = model_class(config(**{**SHAPE, **changes}))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
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
    """Return a model of the same shape with other weights."""
    return save_model(tmp_path_factory.mktemp("next"), seed=2)


@pytest.fixture(scope="session", params=POLICIES)
def policy_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Yield one model of each supported kind."""
    return save_model(tmp_path_factory.mktemp("kind"), seed=3, **POLICIES[request.param])


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    started = Servers(tmp_path_factory.mktemp("sglang"))
    yield started
    started.close()


@pytest.fixture(params=["native", pytest.param("sglang", marks=pytest.mark.sglang)])
def make_engine(request: pytest.FixtureRequest) -> Iterator[MakeEngine]:
    """Return a factory of engines; skip engines that lack a capability the test `needs`."""
    engines: list[Engine] = []
    needs = [need for mark in request.node.iter_markers("needs") for need in mark.args]

    def make(
        folder: Path,
        slots: int = 4,
        max_context: int = 128,
        dtype: torch.dtype = torch.float64,
        decode_text: Callable[[Sequence[int]], str] = show,
    ) -> Engine:
        if request.param == "native":
            engine = _native(folder, slots, max_context, dtype, decode_text)
        else:
            servers: Servers = request.getfixturevalue("servers")
            engine = servers.engine(folder, slots, max_context, dtype, decode_text)
        engines.append(engine)
        for need in needs:
            if not getattr(engine.capabilities, need):
                pytest.skip(f"{request.param} does not declare {need}")
        return engine

    yield make
    for engine in engines:
        drain(engine)


def _native(
    folder: Path,
    slots: int,
    max_context: int,
    dtype: torch.dtype,
    decode_text: Callable[[Sequence[int]], str],
) -> Engine:
    model = load_decoder(folder, dtype)
    device, version = torch.device("cpu"), PolicyVersion(0)
    captured = range(1, model.config.layers + 1)
    return NativeEngine(model, decode_text, slots, max_context, device, version, captured)
