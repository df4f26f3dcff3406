"""Look at a machine before anything is started: is there what TLT needs, in tested versions?"""

from tlt.doctor.all_checks import check_machine
from tlt.doctor.cuda_devices import CudaDevice, CudaState, read_cuda_state
from tlt.doctor.findings import Finding
from tlt.doctor.local_devices import local_devices

__all__ = [
    "CudaDevice",
    "CudaState",
    "Finding",
    "check_machine",
    "local_devices",
    "read_cuda_state",
]
