"""The planner's figures for the learner are the peaks of its live tensors."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import _disable_current_modes

from tests.live_tensor_bytes import LiveTensorBytes
from tests.memory_plan.models import job_of, save_policy, shape_of
from tlt.memory_plan import ModelShape, Spread
from tlt.memory_plan.host_memory import offloaded_bytes
from tlt.memory_plan.learner_memory import learner_items
from tlt.memory_plan.memory_items import peak_bytes
from tlt.models.config_json import read_config
from tlt.ranks.job_sizes_from_spec import count_frozen, lora_shape
from tlt.spec.config import AlgorithmSpec, LoraSpec
from tlt.trainer.policy import policy_models
from tlt.trainer.policy.model import logprobs
from tlt.trainer.policy.model.micro_batches import Minibatch, PolicySample
from tlt.trainer.policy.model.trained_part import ALL_WEIGHTS, TrainedPart
from tlt.trainer.policy.policy_learner import PolicyLearner

SAMPLES, LENGTH, PROMPT = 4, 257, 100
TOKENS, SCORED = SAMPLES * (LENGTH - 1), SAMPLES * (LENGTH - PROMPT)
# the sizes of a policy, and how many logits are computed at once: all, or in parts
SHAPES: dict[str, tuple[Any, dict[str, Any], int]] = {
    "narrow vocabulary": ("qwen2", {"hidden_size": 128, "intermediate_size": 512}, 2**26),
    "wide vocabulary": ("qwen3", {"vocab_size": 8000, "tie_word_embeddings": False}, 2**20),
}


def samples(length: int = LENGTH, count: int = SAMPLES) -> list[PolicySample]:
    answer = length - PROMPT
    return [
        PolicySample(
            prompt=tuple(range(PROMPT)),
            completion=tuple(token % 500 for token in range(answer)),
            logprobs=(-1.0,) * answer,
            temperature=1.0,
            advantage=1.0 if index % 2 else -1.0,
        )
        for index in range(count)
    ]


@pytest.fixture
def group() -> Iterator[ProcessGroup]:
    """Make a group of this process alone: it gathers and reduces as a larger one does."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    made = dist.group.WORLD
    assert made is not None
    yield made
    dist.destroy_process_group()


def measure_update(
    folder: Path,
    group: ProcessGroup | None = None,
    part: TrainedPart = ALL_WEIGHTS,
    **algorithm: Any,
) -> tuple[int, int]:
    """Return the peak of the second update of two micro-batches, and what stays after it."""
    spec = AlgorithmSpec(
        steps=2,
        prompts_per_step=2,
        group_size=2,
        microbatch_tokens=TOKENS,
        attention="padded",
        compile=False,
        **algorithm,
    )
    minibatch = Minibatch(samples=samples() * 2, total_tokens=SCORED, total_sequences=SAMPLES)
    with LiveTensorBytes(resizing=group is not None) as live:
        cpu = torch.device("cpu")
        learner = PolicyLearner(str(folder), spec, None, cpu, group=group, part=part)
        for step in range(2):
            live.restart()
            learner.update(step, [minibatch], group, lambda: None)
    return live.peak, live.now


def planned(policy: ModelShape, chunk: int, shards: int = 1, **changes: Any) -> tuple[int, int]:
    """Return the planned peak, and what stays between updates."""
    job = job_of(policy, answers=2 * SAMPLES, max_context=LENGTH, scored=SCORED, **changes)
    items = tuple(learner_items(job, Spread(device="cpu", shards=shards), chunk))
    return peak_bytes(items), sum(item.bytes for item in items if item.during == "always")


# each two of the three in all combinations
_PAIRS = pytest.mark.parametrize(
    ("shape", "checkpointing", "precision"),
    [
        ("narrow vocabulary", True, "bfloat16"),
        ("narrow vocabulary", False, "float32"),
        ("wide vocabulary", True, "float32"),
        ("wide vocabulary", False, "bfloat16"),
    ],
)


@_PAIRS
def test_an_update_takes_the_planned_bytes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shape: str,
    checkpointing: bool,
    precision: Any,
) -> None:
    family, sizes, chunk = SHAPES[shape]
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", chunk)
    folder = save_policy(tmp_path, family, **sizes)
    policy = shape_of(folder)
    peak, kept = measure_update(folder, precision=precision, gradient_checkpointing=checkpointing)
    expected, stays = planned(
        policy, chunk, bfloat16=precision == "bfloat16", gradient_checkpointing=checkpointing
    )
    assert stays == pytest.approx(kept, rel=0.001)
    # beside the state, which would hide an error in activations
    state = 16 * policy.weights
    assert expected - state == pytest.approx(peak - state, rel=0.02)


@pytest.mark.parametrize(
    ("shape", "targets", "checkpointing", "precision"),
    [
        ("narrow vocabulary", "all-linear", False, "float32"),
        ("narrow vocabulary", "all-linear", True, "bfloat16"),
        ("wide vocabulary", "all-linear", True, "float32"),
        ("wide vocabulary", "all-linear", False, "bfloat16"),
        ("narrow vocabulary", ("q_proj", "v_proj"), False, "float32"),
        ("narrow vocabulary", ("q_proj", "v_proj"), True, "bfloat16"),
    ],
)
def test_an_update_of_an_adapter_takes_the_planned_bytes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shape: str,
    targets: Any,
    checkpointing: bool,
    precision: Any,
) -> None:
    family, sizes, chunk = SHAPES[shape]
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", chunk)
    folder = save_policy(tmp_path, family, **sizes)
    spec = LoraSpec(rank=8, targets=targets)
    changes: dict[str, Any] = {"gradient_checkpointing": checkpointing}
    part = TrainedPart(lora=spec)
    peak, kept = measure_update(folder, part=part, precision=precision, **changes)
    policy, lora = shape_of(folder), lora_shape(spec, read_config(folder))
    bfloat16 = precision == "bfloat16"
    expected, stays = planned(policy, chunk, bfloat16=bfloat16, lora=lora, **changes)
    assert stays == pytest.approx(kept, rel=0.001)
    # the policy's own weights would hide an error in the rest
    state = 4 * policy.weights
    assert expected - state == pytest.approx(peak - state, rel=0.05)


@_PAIRS
def test_a_sharded_update_takes_the_planned_bytes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    group: ProcessGroup,
    shape: str,
    checkpointing: bool,
    precision: Any,
) -> None:
    family, sizes, chunk = SHAPES[shape]
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", chunk)
    folder = save_policy(tmp_path, family, **sizes)
    policy = shape_of(folder)
    changes: dict[str, Any] = {"gradient_checkpointing": checkpointing}
    peak, _ = measure_update(folder, group, shards="all", precision=precision, **changes)
    bfloat16 = precision == "bfloat16"
    expected, _ = planned(policy, chunk, shards=2, bfloat16=bfloat16, **changes)
    # one rank holds the state of two
    state = 16 * policy.weights
    assert expected - state // 2 == pytest.approx(peak - state, rel=0.1)


def test_frozen_weights_have_neither_gradients_nor_moments(tmp_path: Path) -> None:
    folder = save_policy(tmp_path, "qwen2")
    freeze = ("model.embed_tokens.*", "model.layers.[01].*", "*.bias")
    policy, frozen = shape_of(folder), count_frozen(freeze, read_config(folder))
    _, kept = measure_update(folder, part=TrainedPart(freeze=freeze))
    assert planned(policy, 2**26, frozen=frozen)[1] == pytest.approx(kept, rel=0.001)
    assert 0.5 * policy.weights < frozen < 0.9 * policy.weights
    items = {i.name: i.bytes for i in learner_items(job_of(policy, frozen=frozen), Spread())}
    assert items["learner: gradients"] == 4 * (policy.weights - frozen)


def test_an_adapters_reference_is_no_second_copy(tmp_path: Path) -> None:
    folder, part = save_policy(tmp_path, "qwen2"), TrainedPart(lora=LoraSpec())
    _, without = measure_update(folder, part=part)
    assert measure_update(folder, part=part, kl_coefficient=0.1)[1] == without


def test_a_reference_policy_takes_its_parameters(tmp_path: Path) -> None:
    folder = save_policy(tmp_path, "qwen2")
    policy = shape_of(folder)
    _, without = measure_update(folder)
    _, kept = measure_update(folder, kl_coefficient=0.1)
    assert planned(policy, 2**26, reference=True)[1] == pytest.approx(kept, rel=0.001)
    assert kept - without == pytest.approx(4 * policy.weights, rel=0.001)


def test_shards_divide_parameters_gradients_and_moments(tmp_path: Path) -> None:
    policy = shape_of(save_policy(tmp_path, "qwen2"))
    job = job_of(policy)
    whole = {i.name: i.bytes for i in learner_items(job, Spread(ranks=8))}
    parts = {i.name: i.bytes for i in learner_items(job, Spread(ranks=8, shards=8))}
    for name, weights in (("parameters", 4), ("gradients", 4), ("Adam's moments", 8)):
        assert whole[f"learner: {name}"] == weights * policy.weights
        assert parts[f"learner: {name}"] == weights * policy.weights // 8


class HostMemory:
    """Stand for a GPU's host on a CPU: what a forward pass saves there isn't the device's."""

    def __init__(self, device: LiveTensorBytes) -> None:
        self._device = device
        self._saved = LiveTensorBytes()
        self.peak = 0

    def save_on_cpu(self, pin_memory: bool) -> saved_tensors_hooks:
        assert pin_memory
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor:
        # unseen by the device's counter
        with _disable_current_modes():
            saved = tensor.detach().clone()
        self._saved.meet(saved)
        self.peak = max(self.peak, self._saved.now)
        return saved

    def _unpack(self, saved: Tensor) -> Tensor:
        with _disable_current_modes():
            copy = saved.clone()
        self._device.meet(copy)
        return copy


def measure_offloaded_update(
    folder: Path, patch: pytest.MonkeyPatch, minibatch: Minibatch, tokens: int, precision: Any
) -> tuple[int, int]:
    """Return the peaks of the second update, on the device and on its host."""
    spec = AlgorithmSpec(
        steps=2,
        prompts_per_step=2,
        group_size=2,
        microbatch_tokens=tokens,
        attention="padded",
        compile=False,
        precision=precision,
        gradient_checkpointing=True,
    )
    with LiveTensorBytes() as live:
        host = HostMemory(live)
        patch.setattr(policy_models, "save_on_cpu", host.save_on_cpu)
        learner = PolicyLearner(str(folder), spec, None, torch.device("cpu"))
        policy_models.offload_saved_tensors(learner._models.policy.base_model)
        for step in range(2):
            live.restart()
            learner.update(step, [minibatch], None, lambda: None)
    return live.peak, host.peak


@pytest.mark.parametrize(
    ("shape", "precision"), [("narrow vocabulary", "float32"), ("wide vocabulary", "bfloat16")]
)
def test_an_offloaded_update_takes_the_planned_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str, precision: Any
) -> None:
    family, sizes, chunk = SHAPES[shape]
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", chunk)
    folder = save_policy(tmp_path, family, **sizes)
    policy = shape_of(folder)
    minibatch = Minibatch(samples=samples() * 2, total_tokens=SCORED, total_sequences=SAMPLES)
    peak, saved = measure_offloaded_update(folder, monkeypatch, minibatch, TOKENS, precision)
    changes = {"bfloat16": precision == "bfloat16", "gradient_checkpointing": True}
    expected, _ = planned(policy, chunk, offload=True, **changes)
    state = 16 * policy.weights
    assert expected - state == pytest.approx(peak - state, rel=0.03)
    job = job_of(policy, max_context=LENGTH, offload=True, **changes)
    assert offloaded_bytes(job, Spread(device="cpu")) == pytest.approx(saved, rel=0.02)
    assert expected < planned(policy, chunk, **changes)[0]


def test_an_answer_of_16k_tokens_is_learned_within_the_planned_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    length, sizes = 16385, {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": length}
    folder = save_policy(tmp_path, "qwen2", vocab_size=500, **sizes, **heads)
    policy, answer = shape_of(folder), length - PROMPT
    minibatch = Minibatch(samples=samples(length, 1), total_tokens=answer, total_sequences=1)
    peak, saved = measure_offloaded_update(folder, monkeypatch, minibatch, length, "float32")
    job = job_of(
        policy,
        max_context=length,
        scored=answer,
        gradient_checkpointing=True,
        offload=True,
        microbatch_tokens=length - 1,
    )
    spread = Spread(device="cpu")
    assert peak_bytes(tuple(learner_items(job, spread))) == pytest.approx(peak, rel=0.02)
    assert offloaded_bytes(job, spread) == pytest.approx(saved, rel=0.02)
