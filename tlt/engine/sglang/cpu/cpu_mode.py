"""Prepare a process to import and run SGLang on a CPU, with stand-ins for its GPU packages.

A stand-in never hides a real package: their folder comes last in the path, and a machine with a
GPU, or with SGLang's own kernels, is refused.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tlt.errors import ConfigError

_STANDINS = Path(__file__).parent / "standins"


def enter() -> None:
    if torch.cuda.is_available():
        raise ConfigError("SGLang runs on the GPU where there is one; this worker's device is cpu")
    if str(_STANDINS) in sys.path:
        return
    kernels = find_spec("sgl_kernel")
    if kernels is not None and not str(kernels.origin).startswith(str(_STANDINS)):
        raise ConfigError("SGLang's compiled kernels are installed here: its CPU mode is for none")
    # Transformers caches that there is no torchvision, before the stand-in can be found
    from transformers.utils.import_utils import is_torchvision_available

    is_torchvision_available()
    sys.path.append(str(_STANDINS))


def leave() -> None:
    """Hide the stand-ins from later imports and from this process's children."""
    if str(_STANDINS) in sys.path:
        sys.path.remove(str(_STANDINS))


def environment(schedulers: int) -> dict[str, str]:
    """Return the variables that SGLang and torch need while SGLang is imported and started."""
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        # SGLang asks for a core of each scheduler, and binds to it only with kernels of its own
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join("0" * schedulers),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def arguments() -> dict[str, Any]:
    return {
        "attention_backend": "torch_native",
        "speculative_draft_attention_backend": "intel_amx",
        "disable_cuda_graph": True,
        "mem_fraction_static": 0.3,
    }
