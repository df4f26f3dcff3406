"""Fused norms and gates compute the same numbers, and replace only modules that do so."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from tlt.kernels.training_kernels import TrainingKernels, load_kernels
from tlt.trainer.policy.speed.fused_layers import fuse, restore, unfuse


@pytest.fixture
def built() -> TrainingKernels:
    found = load_kernels()
    if found is None:
        pytest.skip("no C compiler")
    return found


def agree(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [1, 3, 16, 33, 200])
def test_norm_equals_torchs(built: TrainingKernels, width: int):
    torch.manual_seed(width)
    x, weight, slope = torch.randn(5, 7, width), torch.randn(width), torch.randn(5, 7, width)
    out, inverse = built.norm(x, weight, 0.01)
    ours = (out, *built.norm_backward(slope, x, weight, inverse))
    exact = [tensor.double().requires_grad_() for tensor in (x, weight)]
    expected = functional.rms_norm(exact[0], (width,), exact[1], 0.01)
    agree(ours, (expected, *torch.autograd.grad(expected, exact, slope.double())))


@pytest.mark.parametrize("count", [1, 15, 16, 1000])
def test_gate_equals_torchs(built: TrainingKernels, count: int):
    gate, up, slope = torch.linspace(-100, 100, count), torch.randn(count), torch.randn(count)
    ours = (built.gated(gate, up), *built.gated_backward(slope, gate, up))
    exact = [tensor.double().requires_grad_() for tensor in (gate, up)]
    expected = functional.silu(exact[0]) * exact[1]
    agree(ours, (expected, *torch.autograd.grad(expected, exact, slope.double())))


def test_keeps_nan(built: TrainingKernels):
    x = torch.ones(3, 20)
    x[1, 4] = torch.nan
    assert built.norm(x, torch.ones(20), 0.1)[0].isnan().any(1).tolist() == [False, True, False]
    assert built.gated(x, torch.ones(3, 20)).isnan().sum() == 1


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()]))


def test_fused_module_has_the_same_gradients(built: TrainingKernels):
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=24, intermediate_size=40, num_attention_heads=2)
    norm, mlp = LlamaRMSNorm(24), LlamaMLP(config)
    nn.init.normal_(norm.weight)
    model = nn.Sequential(norm, mlp)
    x = torch.randn(2, 5, 24, requires_grad=True)
    before = gradients(model, x)
    fuse(model, built)
    assert "forward" in norm.__dict__
    assert "forward" in mlp.__dict__
    for a, b in zip(gradients(model, x), before, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    fused = unfuse(model)
    assert fused.keys() == {norm, mlp}
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), before, strict=True))
    restore(fused)
    assert unfuse(model) == fused


def test_half_precision_runs_the_original_module(built: TrainingKernels):
    norm = LlamaRMSNorm(8)
    x = torch.randn(3, 8).bfloat16()
    plain = norm(x)
    fuse(norm, built)
    assert torch.equal(norm(x), plain)


def test_leaves_similar_modules_alone(built: TrainingKernels):
    other = GemmaRMSNorm(8)
    other.variance_epsilon = other.eps
    nn.init.normal_(other.weight)
    mlp = LlamaMLP(
        LlamaConfig(hidden_size=8, intermediate_size=8, num_attention_heads=2, hidden_act="gelu")
    )
    fuse(nn.Sequential(other, mlp), built)
    assert "forward" not in other.__dict__
    assert "forward" not in mlp.__dict__


@pytest.mark.parametrize(("scale", "last"), [(0.02, 0.0), (0.02, 1e-4), (1e-6, 1.0)])
@pytest.mark.parametrize("act", ["gelu", "gelu_pytorch_tanh", "relu"])
def test_recognises_another_activation_despite_small_weights(
    built: TrainingKernels, act: str, scale: float, last: float
):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_attention_heads=2, hidden_act=act
    )
    mlp = LlamaMLP(config)
    for weight in mlp.parameters():
        nn.init.normal_(weight, std=scale)
    nn.init.normal_(mlp.down_proj.weight, std=last)
    fuse(mlp, built)
    assert "forward" not in mlp.__dict__


def test_keeps_forwards_replaced_by_others(built: TrainingKernels):
    norm, other = LlamaRMSNorm(8), LlamaRMSNorm(8)
    own = norm.forward
    norm.forward = own
    model = nn.Sequential(norm, other)
    fuse(model, built)
    assert unfuse(model).keys() == {other}
    assert norm.forward is own


def test_refuses_a_second_derivative(built: TrainingKernels):
    norm = LlamaRMSNorm(8)
    fuse(norm, built)
    x = torch.randn(3, 8, requires_grad=True)
    (slope,) = torch.autograd.grad(norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


@pytest.mark.parametrize(("family", "fused"), [("llama", 7), ("qwen3", 11), ("gemma", 0)])
def test_fused_model_keeps_its_logits(built: TrainingKernels, family: str, fused: int):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=24,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        before = model(tokens).logits
        fuse(model, built)
        torch.testing.assert_close(model(tokens).logits, before)
    assert len(unfuse(model)) == fused
