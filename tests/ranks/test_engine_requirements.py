"""An engine that its device can't hold or compute is refused by name, before it starts."""

from pathlib import Path

import msgspec
import pytest
import torch

from tests.engine.conftest import save_model
from tests.labelled_device import CUDA, labelled_device
from tests.ranks.ranks import local_rank, open_job, with_policy
from tests.small_disk import small_disk
from tlt.base.id_types import PolicyVersion
from tlt.engine.native.prompt_prefill import prefill_rows
from tlt.engine.native.slot_storage import SlotTensors, count_slot_bytes
from tlt.engine.sglang.client.start_engine_with_tap import start_client
from tlt.errors import ConfigError
from tlt.models.config_json import read_config
from tlt.protocol.events import WorkerFailed
from tlt.ranks import engine_requirements
from tlt.ranks.engine_requirements import engine_dtype
from tlt.spec.config import JobSpec, RolloutSpec

CPU = torch.device("cpu")


def spec_of(folder: Path, engine: str = "native", dtype: str = "auto") -> JobSpec:
    rollout = msgspec.convert({"engine": engine, "slots": 4}, RolloutSpec)
    spec = with_policy(folder, rollout=rollout)
    policy = msgspec.structs.replace(spec.policy, dtype=dtype, max_context=None)
    return msgspec.structs.replace(spec, policy=policy)


@pytest.mark.parametrize("engine", ["native", "sglang"])
def test_decodes_in_bfloat16_on_a_gpu_unless_told_otherwise(tmp_path: Path, engine: str) -> None:
    spec = spec_of(tmp_path, engine)
    assert engine_dtype(spec, CUDA) == torch.bfloat16
    assert engine_dtype(spec, CPU) == torch.float32


def test_refuses_float32_with_sglang_on_a_gpu(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "sglang", "float32")
    assert engine_dtype(spec, CPU) == torch.float32
    with pytest.raises(ConfigError, match=r"policy.dtype: float32 with rollout.engine: sglang"):
        engine_dtype(spec, CUDA)
    assert engine_dtype(spec_of(tmp_path / "other", "native", "float32"), CUDA) == torch.float32


def test_a_rank_on_a_gpu_fails_the_job_instead_of_starting_sglang(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "sglang", "float32")
    with labelled_device(), local_rank(tmp_path, device="cuda:0") as local:
        local.rank.handle(open_job(tmp_path, spec))
        (failed,) = local.sent()
    assert isinstance(failed, WorkerFailed)
    assert "policy.dtype" in failed.error


def test_refuses_a_tap_that_shared_memory_has_no_room_for(tmp_path: Path) -> None:
    with small_disk(tmp_path / "flight") as flight, pytest.raises(ConfigError) as refused:
        start_client(
            save_model(tmp_path / "policy", seed=1),
            slots=256,
            max_context=128,
            device=CPU,
            dtype=torch.float32,
            version=PolicyVersion(0),
            folder=flight,
            stuck_seconds=30.0,
        )
    assert str(refused.value).startswith("rollout.slots: 256 answers' tokens and hidden states may")
    assert "has 0.00105 GB free; set fewer slots or a smaller policy.max_con" in str(refused.value)


@pytest.mark.parametrize("captured", [(), (1, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_counts_what_slots_allocate(
    tmp_path: Path, captured: tuple[int, ...], dtype: torch.dtype
) -> None:
    config = read_config(save_model(tmp_path, seed=1, family="qwen3", head_dim=24))
    made = SlotTensors(config, 7, 50, captured, dtype, CPU)
    assert count_slot_bytes(config, 7, 50, len(captured), dtype) == made.bytes


def test_a_gpu_without_room_for_the_models_whole_context_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(tmp_path)
    config = read_config(Path(spec.policy.path))
    rows = prefill_rows(4).stop
    needed = count_slot_bytes(config, rows, config.max_positions, 0, torch.bfloat16)
    monkeypatch.setattr(engine_requirements, "free_device_bytes", lambda _: needed)
    with labelled_device(), local_rank(tmp_path, device="cuda:0") as local:
        local.rank.handle(open_job(tmp_path, spec))
        (failed,) = local.sent()
        assert isinstance(failed, WorkerFailed)
        assert f"{config.max_positions} positions" in failed.error
        assert "policy.max_context is absent" in failed.error
        small = msgspec.structs.replace(spec.policy, max_context=config.max_positions // 4)
        local.rank.handle(open_job(tmp_path, msgspec.structs.replace(spec, policy=small)))
        assert local.sent() == []


def test_a_rank_selects_its_own_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels and clocks that name no device use the selected one."""
    selected: list[torch.device] = []
    with labelled_device():
        monkeypatch.setattr(torch.cuda, "set_device", selected.append)
        with local_rank(tmp_path, device="cuda:3"), local_rank(tmp_path):
            pass
    assert selected == [torch.device("cuda", 3)]
