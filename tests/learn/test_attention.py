from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, MistralForCausalLM

from tests.learn.models import CPU
from tlt.learn.attention import BLOCKED, blocked
from tlt.learn.paths import fastest_attention


@pytest.mark.parametrize("tokens", [1, 5, 128, 129, 300])
@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (4, 2), (2, 1)])
def test_blocks_attend_as_the_kernel_does(tokens: int, heads: int, shared: int):
    torch.manual_seed(tokens)
    query = torch.randn(2, heads, tokens, 8, requires_grad=True)
    key = torch.randn(2, shared, tokens, 8, requires_grad=True)
    value = torch.randn(2, shared, tokens, 8, requires_grad=True)
    theirs = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True, scale=0.3
    )
    ours = blocked(query, key, value, 0.3)
    torch.testing.assert_close(ours, theirs)
    slope = torch.randn_like(ours)
    inputs = (query, key, value)
    for a, b in zip(
        torch.autograd.grad(ours, inputs, slope),
        torch.autograd.grad(theirs, inputs, slope),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_sliding_window_stays_one(tmp_path: Path):
    torch.manual_seed(0)
    config = MistralConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=16,
        sliding_window=4,
        initializer_range=0.5,
    )
    MistralForCausalLM(config).save_pretrained(tmp_path)
    tokens = torch.arange(15)[None]
    with torch.no_grad():
        ours, theirs = (
            AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)(tokens).logits
            for name in (BLOCKED, "eager")
        )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_choice_is_made_once_and_only_where_it_can_pay():
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, num_key_value_heads=1)
    assert fastest_attention(config, "float32", CPU) == "sdpa"
    assert fastest_attention(config, "bfloat16", torch.device("cuda")) == "sdpa"
    chosen = fastest_attention(config, "bfloat16", CPU)
    assert chosen in ("sdpa", BLOCKED)
    assert fastest_attention(config, "bfloat16", CPU) == chosen
