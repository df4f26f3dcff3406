"""Return memory that torch keeps for later to the device, where another process may need it."""

import gc

import torch


def return_free_memory(device: torch.device) -> None:
    """Return all free memory of this process; SGLang's scheduler shares the device with it."""
    if device.type == "cuda":
        # models refer to themselves
        gc.collect()
        torch.cuda.empty_cache()
