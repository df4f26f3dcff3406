"""Attention over packed rows equals that of torch and of Transformers."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.trainer.models import needs_compiler, save_mistral
from tlt.kernels.training_kernels import TrainingKernels, attend_per_sequence, load_kernels
from tlt.trainer.policy.model.model_loading import last_hidden_states
from tlt.trainer.policy.model.packed_attention import NATIVE, PACKED

_PROCESSOR = Path("/proc/cpuinfo").read_text()


@cache
def built(flags: str) -> TrainingKernels | None:
    with pytest.MonkeyPatch.context() as patch:
        if flags:
            patch.setenv("CC", f"cc {flags}")
        return load_kernels.__wrapped__()


@pytest.fixture(params=["", "-mno-avx512f", "-mno-avx"])
def native(request: pytest.FixtureRequest) -> TrainingKernels:
    """Yield kernels built for each register width of the processor."""
    flags: str = request.param
    lacking = flags.removeprefix("-mno-")
    if lacking and not re.search(rf"\b{lacking}\b", _PROCESSOR):
        pytest.skip(f"no {lacking} to do without")
    found = built(flags)
    if found is None:
        pytest.skip("no C compiler")
    return found


@pytest.mark.parametrize(
    "lengths",
    [[1], [5], [64], [65, 1, 200], [31, 32, 33, 3, 2], [16, 500]],
    ids=lambda lengths: "-".join(map(str, lengths)),
)
@pytest.mark.parametrize(
    ("heads", "shared", "width"), [(4, 4, 8), (4, 2, 32), (2, 1, 33), (6, 2, 80)]
)
def test_kernel_computes_what_torch_does(
    native: TrainingKernels, lengths: list[int], heads: int, shared: int, width: int
):
    torch.manual_seed(sum(lengths))
    tokens, scale = sum(lengths), width**-0.5
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    query, slope = torch.randn(tokens, heads, width), torch.randn(tokens, heads, width)
    # scores between -100 and 100, so that exponentials reach their limits
    key, value = 5 * torch.randn(tokens, shared, width), torch.randn(tokens, shared, width)
    out, lse = native.attend(query, key, value, bounds, scale)
    ours = (out, *native.attend_backward(slope, query, key, value, out, lse, bounds, scale))
    exact = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    parts = zip(*(tensor.split(lengths) for tensor in exact), strict=True)
    expected = torch.cat([_naive(*part, scale) for part in parts])
    theirs = (expected, *torch.autograd.grad(expected, exact, slope.double()))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-4, atol=1e-4)


def _naive(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    members = query.shape[1] // key.shape[1]
    keys, values = (tensor.repeat_interleave(members, 1) for tensor in (key, value))
    scores = torch.einsum("qhw,khw->hqk", query, keys) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khw->qhw", weights, values)


def test_keeps_nan(native: TrainingKernels):
    query, bounds = torch.ones(40, 2, 8), torch.tensor([0, 20, 40])
    for index in range(3):
        inputs = [query.clone() for _ in range(3)]
        inputs[index][25] = torch.nan
        out, _ = native.attend(inputs[0], inputs[1], inputs[2], bounds, 1.0)
        assert out[:20].isfinite().all()
        assert out[25].isnan().all()


@pytest.mark.parametrize(
    ("query", "key", "value"),
    [((9, 2, 24), (9, 2, 24), (9, 2, 8)), ((9, 3, 8), (9, 2, 8), (9, 2, 8))],
    ids=["narrow-values", "odd-heads"],
)
@needs_compiler
def test_refuses_shapes_that_do_not_fit(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]
):
    found = load_kernels()
    assert found is not None
    tensors = [torch.randn(shape) for shape in (query, key, value)]
    with pytest.raises(NotImplementedError):
        found.attend(tensors[0], tensors[1], tensors[2], torch.tensor([0, 9]), 1.0)
    with pytest.raises(NotImplementedError):
        torch.ops.tlt.attend(*tensors, torch.tensor([0, 9]), 1.0)


@needs_compiler
@pytest.mark.parametrize("bounds", [torch.tensor([0, 9]).int(), torch.tensor([0, 10])])
def test_refuses_bounds_that_do_not_fit(bounds: Tensor):
    found, tensor = load_kernels(), torch.randn(9, 2, 8)
    assert found is not None
    with pytest.raises(ValueError, match="of 9 tokens"):
        found.attend(tensor, tensor, tensor, bounds, 1.0)


def test_result_is_contiguous():
    query, bounds = torch.randn(9, 2, 8), torch.tensor([0, 4, 9])
    assert attend_per_sequence(query, query, query, bounds, 1.0).is_contiguous()


def _model(folder: str, name: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=name)


@pytest.mark.parametrize("name", [PACKED, pytest.param(NATIVE, marks=needs_compiler)])
def test_packed_sequence_has_the_states_that_it_has_alone(model_dir: str, name: str):
    torch.manual_seed(0)
    lengths = [7, 1, 20, 9]
    tokens = torch.randint(24, (1, sum(lengths)))
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    together = last_hidden_states(_model(model_dir, name), tokens, bounds)[0]
    eager = _model(model_dir, "eager")
    alone = torch.cat([last_hidden_states(eager, part)[0] for part in tokens.split(lengths, 1)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [PACKED, pytest.param(NATIVE, marks=needs_compiler)])
def test_accepts_32_bit_bounds(model_dir: str, name: str):
    tokens, bounds = torch.arange(14)[None], torch.tensor([0, 5, 14])
    model = _model(model_dir, name)
    with torch.no_grad():
        assert torch.equal(
            last_hidden_states(model, tokens, bounds.int()),
            last_hidden_states(model, tokens, bounds),
        )


@pytest.mark.parametrize("name", [PACKED, pytest.param(NATIVE, marks=needs_compiler)])
def test_without_bounds_every_row_is_a_sequence(model_dir: str, name: str):
    tokens = torch.arange(48).view(3, 16) % 24
    with torch.no_grad():
        ours, theirs = (last_hidden_states(_model(model_dir, n), tokens) for n in (name, "eager"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [PACKED, pytest.param(NATIVE, marks=needs_compiler)])
def test_refuses_a_sliding_window(tmp_path: Path, name: str):
    folder = save_mistral(tmp_path)
    with pytest.raises(NotImplementedError, match="sliding_window"):
        _model(folder, name)(torch.arange(15)[None])


@needs_compiler
def test_operator_passes_torchs_checks():
    """Torch checks the schema, fake tensors, and autograd under a compiler."""
    query = torch.randn(9, 2, 4, requires_grad=True)
    key, value = (torch.randn(9, 1, 4, requires_grad=True) for _ in range(2))
    operator: Callable[..., Any] = torch.ops.tlt.attend.default
    torch.library.opcheck(operator, (query, key, value, torch.tensor([0, 4, 9]), 0.5))
