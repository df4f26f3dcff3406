"""Look at a machine before anything is started: is there what TLT needs, in tested versions?"""

from tlt.machine_check.cuda_devices import CudaDevice, CudaState, read_cuda_state
from tlt.machine_check.findings import Finding
from tlt.machine_check.local_devices import local_devices
from tlt.machine_check.machine import check_machine

__all__ = [
    "CudaDevice",
    "CudaState",
    "Finding",
    "check_machine",
    "local_devices",
    "read_cuda_state",
]
