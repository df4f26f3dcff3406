"""Decide whether a job fits its devices; a job that doesn't is refused with what would help."""

import msgspec

from tlt.doctor.memory_plan.items_of_device import device_items, spread_over
from tlt.doctor.memory_plan.job_sizes import JobMemory, Spread
from tlt.doctor.memory_plan.memory_items import Item, Phase, peak_bytes, peak_items, peak_phase
from tlt.doctor.memory_plan.planned_devices import DevicePlan
from tlt.doctor.memory_plan.remedies import Remedy, find_remedies


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    devices: DevicePlan
    spread: Spread
    items: tuple[Item, ...]
    # the phase in which the most is taken, and how much that is
    peak: Phase
    total: int
    budget: int
    # parameters, gradients and moments of the learner
    learner_state: int
    remedies: tuple[Remedy, ...] = ()

    @property
    def fits(self) -> bool:
        return self.total <= self.budget

    @property
    def largest(self) -> Item:
        """Return the largest of the items that are held when the most is held."""
        return max(peak_items(self.items), key=lambda item: item.bytes)


def make_plan(job: JobMemory, devices: DevicePlan, shards: int, tensor_parallel: int) -> MemoryPlan:
    """Plan a job over all devices of the plan."""
    spread = spread_over(devices, shards, tensor_parallel)
    items = device_items(job, spread)
    total = peak_bytes(items)
    fits = total <= devices.budget
    return MemoryPlan(
        devices=devices,
        spread=spread,
        items=items,
        peak=peak_phase(items),
        total=total,
        budget=devices.budget,
        learner_state=(4 * job.learner_weights + 12 * job.trained) // shards,
        remedies=() if fits else find_remedies(job, devices, spread),
    )
