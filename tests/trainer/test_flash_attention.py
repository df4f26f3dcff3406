"""Packed rows reach a GPU's kernel with the right bounds, whichever kernel is installed."""

import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen as torch_varlen
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.labelled_device import CUDA, labelled_device
from tests.trainer.models import CPU, never_interrupt, samples, spec, whole
from tlt.errors import ConfigError
from tlt.kernels.training_kernels import attend_per_sequence
from tlt.trainer.policy.model import packed_attention
from tlt.trainer.policy.model.packed_attention import FLASH, flash_kernel
from tlt.trainer.policy.policy_learner import PolicyLearner
from tlt.trainer.policy.speed import attention_choice

# a labelled device computes everything but attention in float32
pytestmark = pytest.mark.filterwarnings("ignore:CUDA is not available:UserWarning")

LENGTHS = [3, 7, 1, 5]
HEADS, SHARED, WIDTH = 4, 2, 16
SCALE = 0.3


@pytest.fixture(autouse=True)
def _forget_kernel() -> Iterator[None]:
    flash_kernel.cache_clear()
    yield
    flash_kernel.cache_clear()


def attend_by_segment(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float
) -> Tensor:
    """Stand for a GPU's kernel."""
    assert bounds.dtype == torch.int32
    assert int(bounds.diff().max()) == longest
    assert {query.dtype, key.dtype, value.dtype} == {torch.bfloat16}
    inputs = (tensor.float() for tensor in (query, key, value))
    return attend_per_sequence(*inputs, bounds.long(), scale).bfloat16()


def of_torch(real: Callable[..., Any], names_sharing: bool) -> Callable[..., Tensor]:
    """Return a stand-in for torch's function, which takes the arguments that the real one takes.

    Without `enable_gqa` it is that of PyTorch 2.11, whose kernel lets queries share keys anyway.
    """
    signature = inspect.signature(real)
    if not names_sharing:
        kept = [p for name, p in signature.parameters.items() if name != "enable_gqa"]
        signature = signature.replace(parameters=kept)

    def attend(*arguments: Any, **options: Any) -> Tensor:
        given = signature.bind(*arguments, **options).arguments
        assert given["window_size"] == (-1, 0)
        assert given.get("enable_gqa", not names_sharing)
        assert not is_repeated(given["key"])
        assert (given["cu_seq_q"] == given["cu_seq_k"]).all()
        assert given["max_q"] == given["max_k"]
        return attend_by_segment(
            *(given[name] for name in ("query", "key", "value", "cu_seq_q", "max_q", "scale"))
        )

    vars(attend)["__signature__"] = signature
    return attend


def is_repeated(keys: Tensor) -> bool:
    """Return True if neighbouring heads are equal."""
    return keys.shape[1] > 1 and torch.equal(keys[:, 0], keys[:, 1])


def flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
) -> Tensor:
    """Stand for flash-attn's function, which isn't installed."""
    assert causal
    assert not is_repeated(k)
    assert cu_seqlens_q is cu_seqlens_k
    assert max_seqlen_q == max_seqlen_k
    return attend_by_segment(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale)


@pytest.fixture(params=["torch", "torch 2.11", "flash-attn"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param.startswith("torch"):
        made = of_torch(torch_varlen.varlen_attn, names_sharing=request.param == "torch")
        monkeypatch.setattr(torch_varlen, "varlen_attn", made)
    else:
        module = ModuleType("flash_attn")
        vars(module)["flash_attn_varlen_func"] = flash_attn
        monkeypatch.setitem(sys.modules, "flash_attn", module)


def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    return ALL_ATTENTION_FUNCTIONS[FLASH](
        torch.nn.Identity(), query, key, value, None, scaling=SCALE, **options
    )[0]


@pytest.mark.parametrize("longest", [max(LENGTHS), None])
def test_each_sequence_attends_to_itself(kernel: None, longest: int | None) -> None:
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    query = torch.randn(1, HEADS, tokens, WIDTH)
    key, value = torch.randn(2, 1, SHARED, tokens, WIDTH)
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    out = attend(query, key, value, cu_seq_lens_q=bounds, max_length_q=longest)
    begin = 0
    for length in LENGTHS:
        part = slice(begin, begin := begin + length)
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(tensor[:, :, part] for tensor in (query, key, value)),
            is_causal=True,
            scale=SCALE,
            enable_gqa=True,
        )
        torch.testing.assert_close(out[:, part].transpose(1, 2), expected, rtol=0.02, atol=0.03)


def test_rows_without_bounds_are_sequences(kernel: None) -> None:
    query, key, value = torch.randn(3, 2, HEADS, 6, WIDTH)
    out = attend(query, key, value)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=SCALE
    )
    torch.testing.assert_close(out.transpose(1, 2), expected, rtol=0.02, atol=0.03)


def test_torchs_own_kernel_is_reached_in_both_passes() -> None:
    """Fake tensors have no data, so the real function runs up to the kernel without a GPU."""
    with FakeTensorMode():
        query = torch.empty(1, HEADS, 16, WIDTH, requires_grad=True)
        key, value = (torch.empty(1, SHARED, 16, WIDTH, requires_grad=True) for _ in range(2))
        bounds = torch.empty(5, dtype=torch.long)
        out = attend(query, key, value, cu_seq_lens_q=bounds, max_length_q=7)
        assert (out.shape, out.dtype) == ((1, 16, HEADS, WIDTH), torch.float32)
        out.sum().backward()
        for tensor in (query, key, value):
            assert tensor.grad is not None
            assert tensor.grad.shape == tensor.shape


def test_an_update_is_that_of_padded_rows(model_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_attention, "flash_kernel", lambda: attend_by_segment)
    work = [whole(samples(8))]
    norms: dict[str, float] = {}
    with labelled_device():
        for attention in ("padded", "flash"):
            chosen = spec(attention=attention, precision="bfloat16")
            learner = PolicyLearner(model_dir, chosen, None, CUDA)
            norms[attention] = learner.update(0, work, None, never_interrupt).gradient_norm
    assert norms["flash"] == pytest.approx(norms["padded"], rel=0.05)


def test_chosen_by_itself_on_a_gpu_if_it_pays(
    model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_attention, "flash_kernel", lambda: attend_by_segment)
    seconds = {"padded": 2.0, "flash": 1.0}
    monkeypatch.setattr(attention_choice, "layer_seconds", lambda *a: seconds[a[-1]])
    monkeypatch.setattr(attention_choice, "choices", {})
    with labelled_device():
        learner = PolicyLearner(model_dir, spec(precision="bfloat16"), None, CUDA)
        assert learner._models.packed
        learner = PolicyLearner(model_dir, spec(precision="float32"), None, CUDA)
        assert not learner._models.packed


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_refused_without_a_gpu(model_dir: str, precision: str) -> None:
    with pytest.raises(ConfigError, match="flash needs a GPU"):
        PolicyLearner(model_dir, spec(attention="flash", precision=precision), None, CPU)
