"""Add up what one device holds of a job."""

from collections.abc import Iterator

from tlt.memory_plan.drafter_memory import drafter_training_items
from tlt.memory_plan.engine_memory import engine_items
from tlt.memory_plan.job_sizes import JobMemory, Spread
from tlt.memory_plan.learner_memory import learner_items
from tlt.memory_plan.memory_items import Item, peak_bytes
from tlt.memory_plan.planned_devices import DevicePlan

# estimates, not measured by TLT: a process's CUDA context with its libraries' workspaces, and the
# buffers of NCCL's communicators
_CONTEXT_BYTES, _COMMUNICATOR_BYTES = 700 << 20, 600 << 20


def spread_over(devices: DevicePlan, shards: int, tensor_parallel: int) -> Spread:
    """Divide a job over all devices of a plan."""
    return Spread(
        ranks=devices.total,
        ranks_per_host=devices.devices,
        shards=shards,
        tensor_parallel=tensor_parallel,
        device=devices.type,
    )


def device_items(job: JobMemory, spread: Spread) -> tuple[Item, ...]:
    return (
        *engine_items(job, spread),
        *learner_items(job, spread),
        *drafter_training_items(job, spread),
        *_reward_models(job, spread),
        *_overhead(job, spread),
    )


def device_bytes(job: JobMemory, spread: Spread) -> int:
    """Return the most that a device holds at once."""
    return peak_bytes(device_items(job, spread))


def _reward_models(job: JobMemory, spread: Spread) -> Iterator[Item]:
    for model in job.reward_models:
        yield from model.items(_CONTEXT_BYTES if spread.device == "cuda" else 0)


def _overhead(job: JobMemory, spread: Spread) -> Iterator[Item]:
    if spread.device == "cpu":
        return
    processes = 2 if job.engine == "sglang" else 1
    yield Item(
        name="CUDA contexts",
        bytes=processes * _CONTEXT_BYTES,
        note=f"an estimate: {_CONTEXT_BYTES >> 20} MiB for each of {processes} processes",
    )
    if spread.ranks > 1:
        communicators = 2 if spread.tensor_parallel > 1 else 1
        yield Item(
            name="communicators",
            bytes=communicators * _COMMUNICATOR_BYTES,
            note=f"an estimate: {_COMMUNICATOR_BYTES >> 20} MiB for each of {communicators}",
        )
