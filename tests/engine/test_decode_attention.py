"""The C attention kernel for decoding agrees with torch and doesn't depend on the batch."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.engine.compiled import INSTRUCTION_SETS, built
from tests.engine.reference import answers, new_request, show
from tlt.base.id_types import PolicyVersion
from tlt.engine.base import Sampling
from tlt.engine.native import NativeEngine, decode_attention_kernels
from tlt.engine.native.decode_attention_kernels import (
    AttentionKernel,
    CacheLayout,
    CompiledWindowAttention,
    find_kernel,
    reference_attention,
)
from tlt.models.decoder_from_folder import load_decoder

_CAPACITY, _SCALE = 100, 0.2
_CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def kernel(request: pytest.FixtureRequest) -> AttentionKernel:
    kernel = decode_attention_kernels.kernel
    return built(kernel, kernel.__wrapped__, request.param)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape)))


def attended(
    kernel: AttentionKernel, queries: torch.Tensor, entries: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    layout = CacheLayout([0, entries.data_ptr()], entries.shape[1] // 2, entries.shape[2])
    return CompiledWindowAttention(kernel, layout, queries, positions, _SCALE).attend(1).clone()


@pytest.mark.parametrize("width", [4, 24, 32, 80, 256])
@pytest.mark.parametrize(
    ("members", "kv_heads", "window"), [(1, 2, 1), (2, 1, 4), (3, 2, 3), (7, 2, 8)]
)
def test_batched_queries_equal_queries_alone(
    kernel: AttentionKernel, width: int, members: int, kv_heads: int, window: int
) -> None:
    lasts = [0, 7, 8, 99]
    # the window of a new row repeats position 0 where it would begin earlier
    positions = torch.tensor(
        [[max(0, last - window + 1 + i) for i in range(window)] for last in lasts]
    )
    entries = drawn(len(lasts), 2 * kv_heads, _CAPACITY, width)
    queries = drawn(positions.numel(), kv_heads * members + 2, width)[:, : kv_heads * members]
    right = reference_attention(queries.double(), entries.double(), positions, _SCALE)
    found = attended(kernel, queries, entries, positions)
    assert (found - right).abs().max() < 1e-5


@pytest.mark.parametrize("width", [12, 32])
def test_output_of_a_query_does_not_depend_on_the_batch(
    kernel: AttentionKernel, width: int
) -> None:
    rows, window = 5, 9
    lasts = torch.tensor([8, 20, 57, 58, 99])
    positions = lasts[:, None] - window + 1 + torch.arange(window)
    entries, queries = drawn(rows, 4, _CAPACITY, width), drawn(rows * window, 6, width)
    together = attended(kernel, queries, entries, positions).view(rows, window, 6, width)
    for row in range(rows):
        for count in range(1, window + 1):
            own = queries.view(rows, window, 6, width)[row, :count].reshape(count, 6, width)
            alone = attended(kernel, own, entries[row : row + 1], positions[row : row + 1, :count])
            assert torch.equal(alone, together[row, :count])


def test_ignores_keys_beyond_the_position(kernel: AttentionKernel) -> None:
    positions = torch.tensor([[40, 41, 42]])
    entries, queries = drawn(1, 2, _CAPACITY, 32), drawn(3, 2, 32)
    before = attended(kernel, queries, entries, positions)
    entries[:, :, 43:] = math.nan
    assert torch.equal(attended(kernel, queries, entries, positions), before)
    entries[:, :, 42] = 1e30
    after = attended(kernel, queries, entries, positions)
    assert torch.equal(after[:2], before[:2])
    assert not torch.equal(after[2], before[2])


@pytest.mark.parametrize("size", [1e-30, 1e4])
def test_handles_very_large_and_vanishing_scores(kernel: AttentionKernel, size: float) -> None:
    positions = torch.tensor([[99], [50]])
    entries, queries = drawn(2, 2, _CAPACITY, 16), size * drawn(2, 2, 16)
    found = attended(kernel, queries, entries, positions)
    right = reference_attention(queries.double(), entries.double(), positions, _SCALE)
    assert (found - right).abs().max() < 1e-4


def test_keeps_nan(kernel: AttentionKernel) -> None:
    positions = torch.tensor([[9], [9]])
    entries, queries = drawn(2, 2, _CAPACITY, 16), drawn(2, 1, 16)
    queries[0, 0, 3] = math.nan
    found = attended(kernel, queries, entries, positions)
    assert found[0].isnan().all()
    assert found[1].isfinite().all()


def test_falls_back_to_torch_for_unsupported_inputs() -> None:
    found = decode_attention_kernels.kernel()
    if found is None:
        pytest.skip("no C compiler")
    assert find_kernel(32, 8, torch.float32, _CPU) is found
    assert find_kernel(30, 8, torch.float32, _CPU) is None
    assert find_kernel(512, 8, torch.float32, _CPU) is None
    assert find_kernel(32, 7, torch.float32, _CPU) is None
    assert find_kernel(32, 8, torch.float64, _CPU) is None
    assert find_kernel(32, 8, torch.float32, torch.device("meta")) is None


def test_is_chosen_however_many_threads_torch_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert find_kernel(32, 8, torch.float32, _CPU) is decode_attention_kernels.kernel()


def test_decodes_the_same_tokens_without_a_compiler(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written() -> Sequence[Sequence[int]]:
        engine = NativeEngine(load_decoder(policy_folder), show, 5, 128, _CPU, PolicyVersion(0))
        submitted = [new_request(i, (3 + i, 4, 5 + i), Sampling(), 60) for i in range(9)]
        return [done.tokens for _, done in sorted(answers(engine, submitted).items())]

    with_it = written()
    monkeypatch.setattr(decode_attention_kernels, "kernel", lambda: None)
    assert written() == with_it
