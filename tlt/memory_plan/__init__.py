"""Compute what a job takes on each device before it runs: arithmetic alone, no torch, no I/O."""

from tlt.memory_plan.device_plan import DevicePlan, parse_plan
from tlt.memory_plan.host_memory import HostItem, host_items
from tlt.memory_plan.job_memory import JobMemory, Spread
from tlt.memory_plan.memory_items import Item
from tlt.memory_plan.model_shapes import DrafterShape, LoraShape, ModelShape
from tlt.memory_plan.remedies import Remedy
from tlt.memory_plan.reward_model_memory import RewardModelMemory
from tlt.memory_plan.verdict import MemoryPlan, make_plan

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
