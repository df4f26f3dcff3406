"""A model folder is read exactly, or refused in one line that names it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from tests.engine.conftest import save_model
from tlt.errors import ConfigError, UnsupportedModel
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.rope import PlainRope

Edit = Callable[[Path], None]


def test_shards_read_like_one_file(folder: Path, tmp_path: Path) -> None:
    LlamaForCausalLM.from_pretrained(folder).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    whole, sharded = load_decoder(folder), load_decoder(tmp_path)
    assert whole.config == sharded.config
    assert whole.weights.keys() == sharded.weights.keys()
    assert all(torch.equal(w, sharded.weights[name]) for name, w in whole.weights.items())


def test_loads_weights_in_the_requested_dtype(folder: Path) -> None:
    assert {w.dtype for w in load_decoder(folder).weights.values()} == {torch.float32}
    halves = load_decoder(folder, torch.bfloat16).weights
    assert {w.dtype for w in halves.values()} == {torch.bfloat16}


def test_reads_rope_as_written_by_both_transformers_versions(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 77.0}
    save_model(tmp_path, seed=1, rope_parameters=rope)
    new = load_decoder(tmp_path).config
    edit_config(rope_parameters=None, rope_theta=77.0, rope_scaling=None)(tmp_path)
    assert new.rope == PlainRope(theta=77.0)
    assert load_decoder(tmp_path).config == new


def edit_config(**changes: Any) -> Edit:
    def edit(folder: Path) -> None:
        file = folder / "config.json"
        merged = {**json.loads(file.read_text()), **changes}
        file.write_text(json.dumps({k: v for k, v in merged.items() if v is not None}))

    return edit


def edit_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Edit:
    def edit(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return edit


def write(name: str, text: str) -> Edit:
    def edit(folder: Path) -> None:
        (folder / name).write_text(text)

    return edit


def remove(name: str) -> Edit:
    return lambda folder: (folder / name).unlink()


def point_to_a_lost_shard(folder: Path) -> None:
    remove("model.safetensors")(folder)
    write("model.safetensors.index.json", '{"weight_map": {"a": "lost.safetensors"}}')(folder)


BIAS = "model.layers.0.self_attn.q_proj.bias"


@pytest.mark.parametrize(
    ("edit", "kind", "complaint"),
    [
        (edit_config(architectures=["Gemma2ForCausalLM"]), UnsupportedModel, "Gemma2ForCausalLM"),
        (
            edit_config(architectures=["Qwen3MoeForCausalLM"], num_experts=128),
            UnsupportedModel,
            "'Qwen3MoeForCausalLM'], a mixture of 128 experts; we run LlamaForCausalLM",
        ),
        (
            edit_config(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "factor": 8}),
            UnsupportedModel,
            "rope of type 'longrope'",
        ),
        (
            edit_config(rope_parameters=None, rope_scaling={"type": "linear"}),
            UnsupportedModel,
            "'linear' lacks a factor",
        ),
        (
            edit_config(rope_parameters={"rope_type": "llama3", "factor": 8}),
            UnsupportedModel,
            "'llama3' lacks a frequency factor",
        ),
        (edit_config(partial_rotary_factor=0.5), UnsupportedModel, "over 0.5 of each head"),
        (
            edit_config(architectures=["Qwen2ForCausalLM"], use_sliding_window=True),
            UnsupportedModel,
            "a sliding window",
        ),
        (edit_config(attention_bias=True), UnsupportedModel, r"q_proj\.bias is missing"),
        (edit_config(architectures=["Qwen3ForCausalLM"]), UnsupportedModel, "q_norm"),
        (edit_config(hidden_act="gelu"), UnsupportedModel, "activation 'gelu'"),
        (edit_config(quantization_config={"bits": 4}), UnsupportedModel, "quantised"),
        (edit_config(num_key_value_heads=3), UnsupportedModel, "3 key-value heads"),
        (edit_config(hidden_size="big"), ConfigError, r"config\.json: Expected `int`"),
        (edit_config(intermediate_size=99), UnsupportedModel, r"config\.json implies \[99, 64\]"),
        (
            edit_weights(lambda w: w.update({BIAS: torch.zeros(64)})),
            UnsupportedModel,
            r"q_proj\.bias belongs to no part",
        ),
        (
            edit_weights(lambda w: w.pop("model.norm.weight")),
            UnsupportedModel,
            r"model\.norm\.weight is missing",
        ),
        (
            edit_weights(lambda w: w.update({k: v.to(torch.int8) for k, v in w.items()})),
            UnsupportedModel,
            "stored as I8",
        ),
        (remove("config.json"), ConfigError, r"config\.json: cannot be read"),
        (write("config.json", "{"), ConfigError, r"config\.json: Input data was truncated"),
        (remove("model.safetensors"), ConfigError, r"holds neither model\.safetensors nor"),
        (write("model.safetensors", "junk"), ConfigError, "cannot be read as safetensors"),
        (point_to_a_lost_shard, ConfigError, r"names lost\.safetensors, which is missing"),
    ],
)
def test_refuses_unsupported_features(
    tmp_path: Path, edit: Edit, kind: type[ConfigError], complaint: str
) -> None:
    save_model(tmp_path, seed=1)
    edit(tmp_path)
    with pytest.raises(kind, match=complaint) as caught:
        load_decoder(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_refuses_another_family_by_name(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=20)).save_pretrained(
        tmp_path
    )
    with pytest.raises(UnsupportedModel, match=r"GPT2LMHeadModel.*we run LlamaForCausalLM"):
        load_decoder(tmp_path)


def test_refuses_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such model folder"):
        load_decoder(tmp_path / "nowhere")
