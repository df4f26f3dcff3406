"""Compute what a job takes on each device before it runs: arithmetic alone, no torch, no I/O."""

from tlt.doctor.memory_plan.host_memory import HostItem, host_items
from tlt.doctor.memory_plan.job_sizes import JobMemory, RewardModelMemory, Spread
from tlt.doctor.memory_plan.memory_items import Item
from tlt.doctor.memory_plan.model_shapes import DrafterShape, LoraShape, ModelShape
from tlt.doctor.memory_plan.planned_devices import DevicePlan, parse_plan
from tlt.doctor.memory_plan.verdict import MemoryPlan, Remedy, make_plan

__all__ = [
    "DevicePlan",
    "DrafterShape",
    "HostItem",
    "Item",
    "JobMemory",
    "LoraShape",
    "MemoryPlan",
    "ModelShape",
    "Remedy",
    "RewardModelMemory",
    "Spread",
    "host_items",
    "make_plan",
    "parse_plan",
]
