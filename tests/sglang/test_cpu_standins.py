"""CPU stand-ins compute the same as the kernels, and SGLang's process-wide changes are undone."""

import asyncio
import importlib.metadata
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.chi_square import p_value
from tests.engine.conftest import save_model
from tlt.engine.sglang.client import sglang_launcher
from tlt.engine.sglang.client.sglang_launcher import Launched, Options
from tlt.engine.sglang.cpu import cpu_mode, draft_verification
from tlt.engine.sglang.cpu.kv_pool_attention import decode_attention, extend_attention
from tlt.errors import ConfigError, RankError

pytestmark = pytest.mark.sglang

_SLOTS = 4


def _surroundings() -> dict[str, Any]:
    return {
        "environment": dict(os.environ),
        "event loops": asyncio.get_event_loop_policy(),
        "signals": [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)],
        "log": (logging.getLogger().handlers[:], logging.getLogger().level),
        "children": multiprocessing.get_start_method(allow_none=True),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("policy"), seed=1, num_hidden_layers=4)


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    before = _surroundings()
    launched = sglang_launcher.start(_options(folder), tmp_path_factory.mktemp("sglang") / "log")
    assert _surroundings() == before
    yield launched
    launched.close()


def _options(folder: Path, **changes: Any) -> Options:
    return Options(
        model=folder,
        device=torch.device("cpu"),
        dtype=torch.float32,
        slots=_SLOTS,
        max_context=128,
        **changes,
    )


def test_modules_without_a_standin_import_and_name_themselves_when_used(engine: Launched) -> None:
    import sgl_kernel
    from sglang.kernels.ops.speculative.eagle import fill_bonus_tokens

    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.gelu_quick has no CPU stand-in"):
        sgl_kernel.gelu_quick(torch.zeros(1))
    with pytest.raises(NotImplementedError, match="rmsnorm_cpu has no CPU stand-in"):
        torch.ops.sgl_kernel.rmsnorm_cpu(torch.zeros(1))
    assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")
    with pytest.raises(NotImplementedError, match=r"fill_bonus_tokens has no CPU stand-in"):
        fill_bonus_tokens[(1,)](torch.zeros(1))


def test_learner_can_compile_in_the_same_process(engine: Launched) -> None:
    from torch.utils._triton import has_triton

    assert not has_triton()
    doubled = torch.compile(lambda x: x + x, backend="eager")
    assert doubled(torch.ones(1)).item() == 2


def test_reports_a_killed_scheduler_and_survives_it(folder: Path, tmp_path: Path) -> None:
    launched = sglang_launcher.start(_options(folder), tmp_path / "log")
    assert launched.failure() is None
    [scheduler] = launched.schedulers
    os.kill(scheduler, signal.SIGSEGV)
    os.waitid(os.P_PID, scheduler, os.WEXITED | os.WNOWAIT)
    died = launched.failure()
    launched.close()
    assert died is not None
    assert died.startswith("was ended by SIGSEGV: ")


def test_reports_a_scheduler_that_fails_to_start_with_its_last_lines(tmp_path: Path) -> None:
    broken = save_model(tmp_path / "broken", seed=1)
    (broken / "model.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(RankError, match=r"scheduler ended with 1: .*SafetensorError"):
        sglang_launcher.start(_options(broken), tmp_path / "log")


def test_refuses_another_version_of_sglang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.24")
    with pytest.raises(ConfigError, match=r"SGLang is 0\.5\.24, and only 0\.5\.23 is supported"):
        sglang_launcher.start(_options(tmp_path), tmp_path / "log")


def test_names_the_install_command_if_sglang_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ConfigError, match=r"pip install sglang==0\.5\.23"):
        sglang_launcher.start(_options(tmp_path), tmp_path / "log")


def test_a_machine_with_a_gpu_has_no_cpu_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="on the GPU where there is one"):
        cpu_mode.enter()


def test_a_standin_never_hides_a_real_package(tmp_path: Path) -> None:
    """Stand-ins can't be removed from a process, so this runs in one of its own."""
    (tmp_path / "triton.py").write_text("")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "sgl_kernel.py").write_text("")
    script = f"""
from importlib.util import find_spec
import sys
from tlt.engine.sglang.cpu import cpu_mode as mode
from tlt.errors import ConfigError

assert find_spec("sgl_kernel") is None
sys.path.append({str(tmp_path / "kernels")!r})
try:
    mode.enter()
except ConfigError:
    sys.path.pop()
mode.enter()
assert find_spec("sgl_kernel") is not None
assert find_spec("triton").origin == {str(tmp_path / "triton.py")!r}
"""
    path = os.pathsep.join([str(tmp_path), os.getcwd()])
    subprocess.run(
        [sys.executable, "-c", script], check=True, env={**os.environ, "PYTHONPATH": path}
    )


@pytest.mark.parametrize("heads", [2, 6])
def test_decode_attention_equals_attention_by_request(heads: int) -> None:
    pool = _Pool(lengths=[1, 9, 30, 4], extends=[1, 1, 1, 1], heads=heads)
    output = torch.empty_like(pool.queries)
    new = torch.stack([pool.slot(request, -1) for request in range(4)])
    keys, values = pool.keys[new].clone(), pool.values[new].clone()
    pool.keys[new], pool.values[new] = 0.0, 0.0
    decode_attention(
        *(pool.queries, pool.keys, pool.values, 1.0, 1.0, output, keys, values, new, keys),
        *(pool.table, pool.rows, pool.lengths, pool.scaling, 0.0, False, 0, None, None),
    )
    assert torch.allclose(output, pool.attended(), atol=1e-12)


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("extends", [[4, 4, 4, 4], [1, 9, 13, 2], [40, 40, 40, 40]])
def test_extend_attention_equals_attention_by_request(heads: int, extends: list[int]) -> None:
    pool = _Pool(lengths=[40, 50, 60, 41], extends=extends, heads=heads)
    output = torch.empty_like(pool.queries)
    starts = pool.extends.cumsum(0) - pool.extends
    extend_attention(
        *(pool.queries, None, None, output, pool.keys, pool.values, 1.0, 1.0, pool.table),
        *(pool.rows, pool.lengths, pool.extends, starts, max(extends), pool.scaling, 0.0),
        *(False, 0, None, None, None, True),
    )
    assert torch.allclose(output, pool.attended(), atol=1e-12)


class _Pool:
    """Requests with scattered tokens; the table is invalid beyond their ends."""

    def __init__(self, lengths: list[int], extends: list[int], heads: int) -> None:
        width, slots = 8, 400
        generator = torch.Generator().manual_seed(heads + sum(extends))
        self.lengths, self.extends = torch.tensor(lengths), torch.tensor(extends)
        self.keys = torch.randn(slots, 2, width, generator=generator).double()
        self.values = torch.randn(slots, 2, width, generator=generator).double()
        self.queries = torch.randn(sum(extends), heads, width, generator=generator).double()
        self.scaling = width**-0.5
        self.rows = torch.tensor([5, 0, 3, 2])
        self.table = torch.full((7, 64), -1, dtype=torch.int32)
        scattered = torch.randperm(slots, generator=generator)[: sum(lengths)].split(lengths)
        for row, own in zip(self.rows.tolist(), scattered, strict=True):
            self.table[row, : len(own)] = own

    def slot(self, request: int, position: int) -> torch.Tensor:
        row, length = self.rows[request], self.lengths[request]
        return self.table[row, :length][position].long()

    def attended(self) -> torch.Tensor:
        queries = self.queries.split(self.extends.tolist())
        share = self.queries.shape[1] // self.keys.shape[1]
        output: list[torch.Tensor] = []
        for request, own in enumerate(queries):
            length = int(self.lengths[request])
            slots = self.table[self.rows[request], :length].long()
            for i, query in enumerate(own):
                seen = slots[: length - len(own) + i + 1]
                for head, vector in enumerate(query):
                    scores = self.keys[seen, head // share] @ vector * self.scaling
                    output.append(scores.softmax(0) @ self.values[seen, head // share])
        return torch.stack(output).view(self.queries.shape)


def _verified(requests: int, count: int) -> dict[str, torch.Tensor]:
    return {
        "predicts": torch.zeros(requests * count, dtype=torch.int32),
        "accept_index": torch.full((requests, count), -1, dtype=torch.int32),
        "accept_token_num": torch.zeros(requests, dtype=torch.int32),
    }


def test_greedy_verification_ends_with_the_first_token_of_the_targets() -> None:
    found = _verified(3, 4)
    draft_verification.verify_tree_greedy(
        **found,
        candidates=torch.tensor([[7, 1, 2, 3], [7, 1, 5, 3], [7, 9, 2, 3]]),
        target_predict=torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]]),
    )
    assert found["accept_token_num"].tolist() == [3, 1, 0]
    assert found["accept_index"].tolist() == [[0, 1, 2, 3], [4, 5, -1, -1], [8, -1, -1, -1]]
    assert found["predicts"].tolist() == [1, 2, 3, 4, 1, 2, 0, 0, 1, 0, 0, 0]


def test_sampled_verification_follows_the_target() -> None:
    """Compare the first two tokens of many requests with the same drafts."""
    requests, vocabulary = 40_000, 5
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(3, vocabulary, generator=generator).add(0.05)
    target = (rows / rows.sum(-1, keepdim=True)).expand(requests, 3, vocabulary)
    found = _verified(requests, 3)
    draft_verification.tree_speculative_sampling_target_only(
        **found,
        candidates=torch.tensor([[0, 2, 4]]).expand(requests, 3),
        uniform_samples=torch.rand(requests, 3, generator=generator),
        uniform_samples_for_final_sampling=torch.rand(requests, generator=generator),
        target_probs=target,
        threshold_single=1.0,
        threshold_acc=1.0,
    )
    tokens = found["predicts"].view(requests, 3).long()
    # draw the token after a rejected first draft here; SGLang draws it in the next pass
    second = torch.where(
        found["accept_token_num"] > 0,
        tokens[:, 1],
        torch.multinomial(target[0, 1], requests, replacement=True, generator=generator),
    )
    expected = (target[0, 0][:, None] * target[0, 1]).flatten()
    # row 1 is the distribution behind the first draft, and stands in for that behind other tokens
    counts = torch.bincount(tokens[:, 0] * vocabulary + second, minlength=vocabulary**2)
    assert p_value(counts, expected) > 1e-3


def test_filters_keep_the_most_likely_tokens() -> None:
    probabilities = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.3, 0.2]])
    assert torch.allclose(
        draft_verification.top_k_renorm_prob(probabilities, torch.tensor([2, 1])),
        torch.tensor([[0, 4 / 7, 0, 3 / 7], [0, 0, 1, 0]]),
    )
    assert torch.allclose(
        draft_verification.top_p_renorm_prob(probabilities, torch.tensor([0.65, 0.3])),
        torch.tensor([[0, 4 / 7, 0, 3 / 7], [0, 0, 1, 0]]),
    )
