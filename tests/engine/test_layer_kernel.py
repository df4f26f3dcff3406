"""The C kernel of a layer's parts agrees with torch, for all policies and any number of tokens."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.engine.compiled import INSTRUCTION_SETS, built
from tests.engine.reference import answers, new_request, show
from tlt.base.id_types import PolicyVersion
from tlt.engine.base import Sampling
from tlt.engine.native import NativeEngine, layer_forward, layer_kernel
from tlt.engine.native.layer_kernel import LayerKernel, find_kernel
from tlt.models.decoder_from_folder import load_decoder

_CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def kernel(request: pytest.FixtureRequest) -> LayerKernel:
    kernel = layer_kernel.kernel
    return built(kernel, kernel.__wrapped__, request.param)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("width", [1, 15, 64, 576])
def test_normalises_and_gates_as_torch_does(kernel: LayerKernel, width: int) -> None:
    x, gate_up = drawn(5, width), 20 * drawn(5, 2 * width)
    right = F.silu(gate_up[:, :width]) * gate_up[:, width:]
    up = gate_up[:, width:].clone()
    # the row behind the last one must stay
    normed = torch.full((6, width), torch.nan)
    kernel.normalise(x.data_ptr(), normed.data_ptr(), 5, width, 0.7)
    kernel.gate(gate_up.data_ptr(), 5, width)
    length = (x.double().square().sum(1, keepdim=True) + 0.7**2).sqrt()
    torch.testing.assert_close(normed[:5].double(), x / length, rtol=1e-5, atol=1e-6)
    assert normed[5].isnan().all()
    torch.testing.assert_close(gate_up[:, :width], right, rtol=1e-5, atol=1e-6)
    assert torch.equal(gate_up[:, width:], up)


@pytest.mark.parametrize("width", [2, 24, 64])
def test_rotates_the_first_heads_and_caches_the_last(kernel: LayerKernel, width: int) -> None:
    heads = drawn(4, 7, width)
    turns = torch.polar(torch.ones(4, width // 2), drawn(4, width // 2))
    right = heads.clone()
    pairs = right[:, :5].view(torch.complex64)
    pairs.mul_(turns[:, None])
    kernel.rotate(heads.data_ptr(), 7 * width, turns.data_ptr(), 4, 5, width)
    torch.testing.assert_close(heads, right, rtol=1e-5, atol=1e-6)
    cache, rows = torch.zeros(20, width), torch.randperm(20)[:16].view(4, 4)
    kernel.cache_entries(
        heads[:, 3:].data_ptr(), 7 * width, 4, 4, width, cache.data_ptr(), rows.data_ptr()
    )
    assert torch.equal(cache[rows], heads[:, 3:])
    assert cache.count_nonzero() == 16 * width


def test_decodes_the_same_tokens_without_a_compiler(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written() -> Sequence[Sequence[int]]:
        engine = NativeEngine(load_decoder(policy_folder), show, 5, 128, _CPU, PolicyVersion(0))
        submitted = [new_request(i, (3 + i, 4, 5 + i), Sampling(), 30) for i in range(9)]
        return [done.tokens for _, done in sorted(answers(engine, submitted).items())]

    with_it = written()
    monkeypatch.setattr(layer_forward, "find_kernel", lambda _: None)
    assert written() == with_it


def test_other_dtypes_and_devices_use_torch() -> None:
    assert find_kernel(torch.empty(1)) is layer_kernel.kernel()
    assert find_kernel(torch.empty(1).bfloat16()) is None
    assert find_kernel(torch.empty(1, device="meta")) is None
