"""A drafter folder that can't be run is refused by name when it is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer.drafters import LAYERS, LAYOUTS, config, drafter, ends
from tlt.errors import UnsupportedModel
from tlt.models.drafter_folder import TOKEN_MAP, load_drafter, save_drafter
from tlt.models.eagle_drafter import architecture


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_drafter(drafter("eagle"), tmp_path)
    return tmp_path


def test_loads_a_saved_drafter(folder: Path) -> None:
    assert load_drafter(folder, LAYERS).config == config("eagle")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_drafter_of_some_tokens_keeps_them(layout: str, tmp_path: Path) -> None:
    made, policy_head = drafter(layout, hot_tokens=12), ends().head
    assert made.tokens is not None
    save_drafter(made, tmp_path, policy_head=policy_head)
    again = load_drafter(tmp_path, LAYERS)
    assert again.config == made.config
    assert again.d2t is not None
    assert torch.equal(again.d2t, made.get_buffer("d2t"))
    # what a stock SGLang reads
    if layout == "eagle":
        assert torch.load(tmp_path / TOKEN_MAP, weights_only=True) == made.tokens.tolist()
    else:
        rows = load_file(tmp_path / "model.safetensors")["lm_head.weight"]
        assert torch.equal(rows, policy_head[made.tokens])
        assert json.loads((tmp_path / "config.json").read_text())["draft_vocab_size"] == 12


def test_a_drafters_digest_is_that_of_earlier_versions_unless_it_has_some_tokens() -> None:
    whole = config("eagle")
    assert architecture(whole) == "6f3e45a15ea092af59f8d859d4327c6e7fb48a0b"
    assert architecture(config("eagle", hot_tokens=12)) != architecture(whole)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "we run drafters of one layer"),
        ({"num_hidden_layers": 2}, "with 2 layers; we run drafters of one layer"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope is scaled"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope is scaled"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0}}, "rope is scaled"),
        ({"num_attention_heads": 0}, "without attention heads"),
        ({"intermediate_size": 12}, r"is \[20, 16\], config.json implies \[12, 16\]"),
    ],
)
def test_refuses_a_drafter_of_another_kind(
    folder: Path, change: dict[str, Any], complaint: str
) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(UnsupportedModel, match=complaint):
        load_drafter(folder, LAYERS)


def test_refuses_a_missing_or_additional_tensor(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = min(tensors)
    save_file({**tensors, "more": tensors[name].clone()}, file)
    with pytest.raises(UnsupportedModel, match="has more, which we don't run"):
        load_drafter(folder, LAYERS)
    save_file({other: tensor for other, tensor in tensors.items() if other != name}, file)
    with pytest.raises(UnsupportedModel, match=f"lacks {name}"):
        load_drafter(folder, LAYERS)
