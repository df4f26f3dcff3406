"""Judge what was found about CUDA: the machine may do without, unless a session wants it."""

from collections.abc import Iterator

from tlt.base.cuda_toolkit import lacking_build_tools, packaged_toolkit
from tlt.doctor.cuda_devices import CudaDevice, CudaState
from tlt.doctor.findings import Finding, Status
from tlt.doctor.tested_versions import installed_version, parse_version

# by CUDA's major release: the driver's first release that runs it
_LEAST_DRIVERS = {11: 450, 12: 525, 13: 580}
# part of a device's memory that may be taken by others without a warning
_TAKEN = 0.1
_LEAST_CAPABILITY = 8.0
_BUILDS = "kernel builds"
_MEMORY_SAVER = "torch-memory-saver"
# the compiler, and the headers that it has to be of the same release as
_TOOLKIT_PACKAGES = ("nvidia-cuda-nvcc", "nvidia-cuda-runtime")
_COMPILER_PACKAGES = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm")
_INSTALL = "install a torch that is built for CUDA: https://pytorch.org/get-started/locally"


def check_cuda(state: CudaState, wanted: bool) -> Iterator[Finding]:
    """Yield findings; without devices they are `missing` if CUDA is wanted."""
    lacking: Status = "missing" if wanted else "warning"
    yield _check_torch(state, lacking, wanted)
    yield _check_driver(state, lacking)
    if state.error is not None:
        yield Finding(
            subject="devices",
            found=f"unusable: {state.error}",
            status=lacking,
            advice="run nvidia-smi; the driver and torch have to fit each other",
        )
    elif not state.devices:
        yield Finding(
            subject="devices",
            found="no GPU; ranks compute on CPU cores",
            status="missing" if wanted else "ok",
            advice="start with --device cpu" if wanted else "",
        )
    for index, device in enumerate(state.devices):
        yield _check_device(index, device)
    if state.devices:
        yield _check_memory_saver()
    if state.devices and state.torch_cuda is not None:
        yield check_kernel_builds(state.torch_cuda)


def _check_torch(state: CudaState, lacking: Status, wanted: bool) -> Finding:
    if state.torch_cuda is not None:
        note = f"{state.torch_cuda}; TLT was tested with torch for CPUs only"
        return Finding(subject="CUDA of torch", found=note)
    present = wanted or state.driver is not None
    return Finding(
        subject="CUDA of torch",
        found="none: torch is built for CPUs",
        status=lacking if present else "ok",
        advice=_INSTALL if present else "",
    )


def _check_driver(state: CudaState, lacking: Status) -> Finding:
    if state.driver is None:
        needed = state.torch_cuda is not None
        return Finding(
            subject="driver",
            found="none",
            status=lacking if needed and not state.devices else "ok",
            advice="install NVIDIA's driver" if needed and not state.devices else "",
        )
    if state.torch_cuda is not None:
        major = parse_version(state.torch_cuda)[0]
        least = _LEAST_DRIVERS.get(major)
        if least is not None and parse_version(state.driver) < (least,):
            return Finding(
                subject="driver",
                found=state.driver,
                status=lacking,
                advice=f"CUDA {state.torch_cuda} needs {least} or newer",
            )
    return Finding(subject="driver", found=state.driver)


def _check_memory_saver() -> Finding:
    """Look for what lets SGLang free its cache while a rank updates the policy."""
    version = installed_version(_MEMORY_SAVER)
    if version is not None:
        return Finding(subject=_MEMORY_SAVER, found=version)
    return Finding(
        subject=_MEMORY_SAVER,
        found="not installed",
        status="warning",
        advice="SGLang keeps its cache during policy updates: plan with rollout.slots for that; "
        f"pip install {_MEMORY_SAVER}",
    )


def check_kernel_builds(release: str) -> Finding:
    """Look for what SGLang compiles kernels with; `release` is that of torch's CUDA."""
    found, lacking = "nvcc, a C++ compiler and ninja", lacking_build_tools()
    if lacking:
        found = f"no {', no '.join(lacking)}"
    elif packaged_toolkit() is not None:
        nvcc, headers = (installed_version(package) or "none" for package in _TOOLKIT_PACKAGES)
        if parse_version(nvcc)[:2] == parse_version(headers)[:2]:
            return Finding(subject=_BUILDS, found=f"{found}; nvcc {nvcc} of a package")
        found = f"nvcc {nvcc} beside CUDA's headers {headers}, which refuse it"
    else:
        return Finding(subject=_BUILDS, found=found)
    packages = (f"{package}=={release}.*" for package in _COMPILER_PACKAGES)
    return Finding(
        subject=_BUILDS,
        found=found,
        status="warning",
        advice="rollout.engine: sglang compiles kernels: install g++, and CUDA's toolkit or "
        f"pip install ninja {' '.join(packages)}",
    )


def _check_device(index: int, device: CudaDevice) -> Finding:
    found = f"{device.name}: {device.free / 1e9:.1f} of {device.total / 1e9:.1f} GB free"
    what = f"device {index}"
    if float(device.capability) < _LEAST_CAPABILITY:
        advice = f"compute capability {device.capability} has no bfloat16: use float32"
        return Finding(subject=what, found=found, status="warning", advice=advice)
    if device.free < (1 - _TAKEN) * device.total:
        advice = "another process takes its memory: see nvidia-smi"
        return Finding(subject=what, found=found, status="warning", advice=advice)
    return Finding(subject=what, found=found)
