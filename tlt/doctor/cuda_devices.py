"""Ask torch about CUDA devices in a process of its own.

Reading a device's free memory makes a context that takes half a gigabyte of it, and a broken
driver may hang or crash the process that asks.
"""

import subprocess
import sys

import msgspec

_TIMEOUT_SECONDS = 120.0
_PROGRAM = """
import json, torch
found = {"torch_cuda": torch.version.cuda, "devices": []}
try:
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        found["devices"].append({
            "name": torch.cuda.get_device_name(index), "free": free, "total": total,
            "capability": f"{major}.{minor}",
        })
except Exception as error:
    found["error"] = " ".join(str(error).split())
print(json.dumps(found))
"""


class CudaDevice(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    free: int
    total: int
    capability: str


class CudaState(msgspec.Struct, frozen=True, kw_only=True):
    # the CUDA release that torch is built for; None if it is built for CPUs
    torch_cuda: str | None = None
    # the driver's release; None if there is no driver
    driver: str | None = None
    devices: tuple[CudaDevice, ...] = ()
    # why devices can't be used, although there may be some
    error: str | None = None


def read_cuda_state() -> CudaState:
    driver = _read_driver()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=_TIMEOUT_SECONDS,
        )
        found = msgspec.json.decode(done.stdout.strip().rpartition(b"\n")[2], type=CudaState)
    except subprocess.TimeoutExpired:
        return CudaState(driver=driver, error=f"no answer within {_TIMEOUT_SECONDS:.0f} s")
    except (OSError, msgspec.DecodeError):
        return CudaState(driver=driver, error="torch cannot be imported, or crashed")
    return msgspec.structs.replace(found, driver=driver)


def _read_driver() -> str | None:
    """Return the release that nvidia-smi reports."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=30.0
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    first, *_ = done.stdout.split() or [""]
    return first if done.returncode == 0 and first else None
