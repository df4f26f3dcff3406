"""Whether SGLang runs on this machine's CPU, and what the process needs before it imports SGLang.

A stand-in never hides a real package: their folder comes last in the path, and a machine that has
a GPU, or SGLang's own kernels, is refused.
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
    # asked before there is a torchvision, Transformers goes on without it
    from transformers.utils.import_utils import is_torchvision_available

    is_torchvision_available()
    sys.path.append(str(_STANDINS))


def leave() -> None:
    """What was imported stays; this process's own children find no stand-ins."""
    if str(_STANDINS) in sys.path:
        sys.path.remove(str(_STANDINS))


def environment() -> dict[str, str]:
    """What SGLang and torch read while the one is imported and started."""
    return {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}


def arguments() -> dict[str, Any]:
    return {
        "attention_backend": "torch_native",
        "speculative_draft_attention_backend": "intel_amx",
        "disable_cuda_graph": True,
        "mem_fraction_static": 0.3,
    }
