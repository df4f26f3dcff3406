"""Compute what a job takes on each device before it runs: arithmetic alone, no torch, no I/O."""

from tlt.memory_plan.fitting_sizes import FAST_TOKENS, fit_sizes
from tlt.memory_plan.host_memory import HostItem, host_items, most_tap_slots
from tlt.memory_plan.items_of_device import spread_over
from tlt.memory_plan.job_sizes import JobMemory, RewardModelMemory, Spread
from tlt.memory_plan.memory_items import Item
from tlt.memory_plan.model_shapes import DrafterShape, LoraShape, ModelShape
from tlt.memory_plan.planned_devices import DevicePlan, parse_plan
from tlt.memory_plan.verdict import MemoryPlan, Remedy, make_plan

__all__ = [
    "FAST_TOKENS",
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
    "fit_sizes",
    "host_items",
    "make_plan",
    "most_tap_slots",
    "parse_plan",
    "spread_over",
]
