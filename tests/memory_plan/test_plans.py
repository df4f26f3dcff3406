"""Policies fit the devices that they should, and a refusal says what would help."""

from typing import Any

import msgspec
import pytest

from tests.memory_plan.models import job_of
from tlt.errors import ConfigError
from tlt.memory_plan import (
    DevicePlan,
    DrafterShape,
    JobMemory,
    MemoryPlan,
    ModelShape,
    Spread,
    host_items,
    make_plan,
    parse_plan,
)
from tlt.memory_plan.memory_items import Item, peak_bytes, peak_phase


def qwen(**sizes: Any) -> ModelShape:
    settings: dict[str, Any] = {
        "tied": False,
        "qkv_bias": True,
        "out_bias": False,
        "mlp_bias": False,
        "head_norms": False,
        "kv_heads": 8,
        "head_dim": 128,
        "vocabulary": 151936,
    }
    return ModelShape(**(settings | sizes))


SMALL = qwen(hidden=896, intermediate=4864, layers=24, heads=14, kv_heads=2, head_dim=64, tied=True)
MEDIUM = qwen(hidden=4096, intermediate=12288, layers=36, heads=32, qkv_bias=False, head_norms=True)
LARGE = qwen(hidden=5120, intermediate=27648, layers=64, heads=40, vocabulary=152064)


def usual_job(policy: ModelShape, **changes: Any) -> JobMemory:
    settings: dict[str, Any] = {
        "engine_width": 2,
        "slots": 16,
        "max_context": 8192,
        "microbatch_tokens": 8192,
        "gradient_checkpointing": True,
        "bfloat16": True,
        "answers": 512,
    }
    return job_of(policy, **(settings | changes))


def speculating(job: JobMemory) -> JobMemory:
    policy = job.policy
    drafter = DrafterShape(
        layout="eagle",
        hidden=policy.hidden,
        intermediate=policy.intermediate,
        heads=policy.heads,
        kv_heads=policy.kv_heads,
        head_dim=policy.head_dim,
        vocabulary=policy.vocabulary,
        captured=1,
    )
    return msgspec.structs.replace(
        job, drafter=drafter, trains_drafter=True, captured=1, drafts=12, drafter_megabytes=256
    )


def planned(
    job: JobMemory, devices: str, tensor_parallel: int = 1, shards: int | None = None
) -> MemoryPlan:
    """Plan with a learner that is sharded over all devices, unless another number is stated."""
    where = parse_plan(devices)
    return make_plan(job, where, where.total if shards is None else shards, tensor_parallel)


def test_weights_are_those_of_the_published_models() -> None:
    counts = [policy.weights for policy in (SMALL, MEDIUM, LARGE)]
    assert counts == [494_032_768, 8_190_735_360, 32_763_876_352]


@pytest.mark.parametrize("job", [usual_job(SMALL), speculating(usual_job(SMALL))])
def test_half_a_billion_weights_fit_one_device_unsharded(job: JobMemory) -> None:
    plan = planned(job, "1x80gb")
    assert plan.fits
    assert plan.spread.shards == 1
    assert plan.remedies == ()


def test_eight_billion_weights_fit_eight_devices_if_they_are_sharded() -> None:
    job = usual_job(MEDIUM)
    plan = planned(job, "8x80gb")
    assert plan.fits
    assert plan.spread.shards == 8
    refused = planned(job, "8x80gb", shards=1)
    assert not refused.fits
    assert any("shard the learner over 8" in r.change and r.fits for r in refused.remedies)


@pytest.mark.parametrize("tensor_parallel", [1, 8])
def test_32_billion_weights_are_refused_on_eight_devices(tensor_parallel: int) -> None:
    plan = planned(usual_job(LARGE), "8x80gb", tensor_parallel)
    assert not plan.fits
    assert plan.learner_state == 16 * 32_763_876_352 // 8
    together = next(r for r in plan.remedies if r.change.startswith("all of these"))
    assert not together.fits
    # only more devices help
    (enough,) = [remedy for remedy in plan.remedies if remedy.fits]
    assert "the learner sharded over" in enough.change


def test_32_billion_weights_fit_four_hosts_with_engines_of_eight_devices() -> None:
    job = usual_job(LARGE)
    assert planned(job, "4x8x80gb", tensor_parallel=8).fits
    alone = planned(job, "4x8x80gb")
    assert not alone.fits
    assert alone.largest.name == "engine: policy's weights"
    wide = [each for each in alone.remedies if "rollout.tensor_parallel: " in each.change]
    assert any(remedy.fits for remedy in wide)


def test_without_gradient_checkpointing_activations_are_too_much() -> None:
    plan = planned(usual_job(MEDIUM, gradient_checkpointing=False), "8x80gb")
    assert not plan.fits
    assert plan.largest.name == "learner: activations"
    (remedy,) = [r for r in plan.remedies if "gradient_checkpointing" in r.change]
    assert remedy.fits


def test_a_context_of_32k_fits_if_the_host_keeps_the_inputs_of_layers() -> None:
    job = usual_job(MEDIUM, max_context=32768, slots=4, answers=64)
    plan = planned(job, "8x48gb", tensor_parallel=4)
    assert not plan.fits
    (remedy,) = [r for r in plan.remedies if r.change.endswith("offload")]
    assert remedy.fits
    offloaded = msgspec.structs.replace(job, offload=True)
    spread = Spread(ranks=8, ranks_per_host=8, shards=8)
    assert planned(offloaded, "8x48gb", tensor_parallel=4).total == remedy.bytes
    (kept,) = [i for i in host_items(offloaded, spread) if "layers" in i.name]
    # 36 inputs and 3 tensors of the last norm, in bfloat16, on each of eight ranks
    assert kept.bytes == 8 * 39 * 32768 * 4096 * 2


def test_a_job_that_does_not_fit_may_go_without_speculation() -> None:
    plain = usual_job(MEDIUM, slots=24)
    assert planned(plain, "8x80gb").fits
    plan = planned(speculating(plain), "8x80gb")
    assert not plan.fits
    (remedy,) = [r for r in plan.remedies if r.change == "speculation.mode: off"]
    assert remedy.fits
    assert remedy.bytes == planned(plain, "8x80gb").total


def test_a_remedy_says_what_the_job_takes_with_it() -> None:
    plan = planned(usual_job(MEDIUM, slots=64), "8x80gb")
    assert not plan.fits
    (remedy,) = [r for r in plan.remedies if r.change.startswith("rollout.slots: ")]
    slots = int(remedy.change.rpartition(" ")[2])
    assert planned(usual_job(MEDIUM, slots=slots), "8x80gb").total == remedy.bytes
    assert remedy.fits


def test_phases_that_never_meet_are_not_added() -> None:
    items = (
        Item(name="a", bytes=5),
        Item(name="b", bytes=4, during="decoding"),
        Item(name="c", bytes=3, during="policy update"),
        Item(name="d", bytes=2, during="update: scoring"),
        Item(name="e", bytes=1, during="update: backward"),
    )
    assert peak_bytes(items) == 5 + 3 + 2
    assert peak_phase(items) == "update: scoring"


def test_contexts_and_communicators_count_on_gpus_only() -> None:
    job = usual_job(SMALL)
    names = [item.name for item in planned(job, "8x80gb").items]
    assert {"CUDA contexts", "communicators"} <= set(names)
    cpu = DevicePlan(hosts=1, devices=2, memory=2**36, kind="CPU core", type="cpu")
    names = [item.name for item in make_plan(job, cpu, 1, 1).items]
    assert not {"CUDA contexts", "communicators"} & set(names)


@pytest.mark.parametrize(
    ("text", "hosts", "devices", "memory"),
    [
        ("8x80gb", 1, 8, 80_000_000_000),
        ("4x8x80GB", 4, 8, 80_000_000_000),
        ("48gb", 1, 1, 48_000_000_000),
        ("8xh100", 1, 8, int(79.1 * 2**30)),
        ("2x4xh200", 2, 4, int(139.8 * 2**30)),
        ("a100-40", 1, 1, int(39.4 * 2**30)),
    ],
)
def test_plans_are_read(text: str, hosts: int, devices: int, memory: int) -> None:
    plan = parse_plan(text)
    assert (plan.hosts, plan.devices, plan.memory) == (hosts, devices, memory)


@pytest.mark.parametrize(
    ("workers", "ranks", "hosts", "devices"),
    [(3, 1, 1, 3), (2, 4, 1, 8), (3, 4, 3, 4), (16, 1, 2, 8)],
)
def test_a_job_that_asks_for_workers_has_their_devices(
    workers: int, ranks: int, hosts: int, devices: int
) -> None:
    plan = parse_plan("4x8xh100").share(workers, ranks)
    assert (plan.hosts, plan.devices, plan.kind) == (hosts, devices, "h100")


@pytest.mark.parametrize("text", ["8xh1000", "0x80gb", "8x", "x80gb", "2x2x2xh100", "8 h100", ""])
def test_a_wrong_plan_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--plan {text}"):
        parse_plan(text)
