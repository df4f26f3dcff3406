"""Describe this machine's devices as a plan.

Without a GPU a device is a core, and its memory an equal share of what is available.
"""

import os

from tlt.base.available_memory import available_memory
from tlt.doctor.cuda_devices import CudaState
from tlt.memory_plan import DevicePlan


def local_devices(cuda: CudaState) -> DevicePlan:
    if cuda.devices:
        smallest = min(cuda.devices, key=lambda device: device.total)
        return DevicePlan(
            hosts=1, devices=len(cuda.devices), memory=smallest.total, kind=smallest.name
        )
    cores = len(os.sched_getaffinity(0))
    return DevicePlan(
        hosts=1,
        devices=cores,
        memory=available_memory() // cores,
        kind="CPU core",
        type="cpu",
    )
