"""Return memory that is kept for later, to the device or the host: other processes may need it."""

import contextlib
import ctypes
import gc

import torch

_libc = ctypes.CDLL(None)


def return_free_memory(device: torch.device) -> None:
    """Return the device's free memory; SGLang's scheduler shares a GPU with this process."""
    if device.type == "cuda":
        # models refer to themselves
        gc.collect()
        torch.cuda.empty_cache()


def return_memory_of_closed_job(device: torch.device) -> None:
    """Return free memory of the device and of the host; it takes too long for every step."""
    gc.collect()
    return_free_memory(device)
    with contextlib.suppress(AttributeError):  # only glibc has it
        _libc.malloc_trim(0)
