"""Prepare a rank's device, and refuse by name an engine that it can't compute or hold."""

from pathlib import Path

import torch

from tlt.engine.native.prompt_prefill import prefill_rows
from tlt.engine.native.slot_storage import count_slot_bytes
from tlt.errors import ConfigError
from tlt.models.config_json import read_config
from tlt.models.decoder_from_folder import count_weight_bytes
from tlt.spec.config import JobSpec


def engine_dtype(spec: JobSpec, device: torch.device) -> torch.dtype:
    """Return the format in which the engine decodes on this device."""
    name = spec.policy.dtype
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    if name == "float32" and device.type == "cuda" and spec.rollout.engine == "sglang":
        raise ConfigError(
            "policy.dtype: float32 with rollout.engine: sglang needs a CPU, because SGLang's "
            "attention kernels for GPUs take half formats only; set policy.dtype: bfloat16"
        )
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def context_of(spec: JobSpec) -> int:
    """Return the most tokens that a prompt and its answer may have together."""
    policy = spec.policy
    positions = read_config(Path(policy.path)).max_positions
    return min(positions, policy.max_context or positions)


def require_room(spec: JobSpec, captured: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ConfigError if weights and slots of the native engine exceed the device's free memory.

    `captured` states are kept by position.
    """
    free = free_device_bytes(device)
    if free is None:
        return
    folder, slots = Path(spec.policy.path), spec.rollout.chosen_slots
    positions = context_of(spec) + spec.speculation.longest
    rows = prefill_rows(slots).stop
    weights = count_weight_bytes(folder, dtype)
    cache = count_slot_bytes(read_config(folder), rows, positions, captured, dtype)
    if weights + cache <= free:
        return
    reason = (
        "policy.max_context is absent, so they are the model's own limit"
        if spec.policy.max_context is None
        else f"policy.max_context is {spec.policy.max_context}"
    )
    off = ", or speculation.mode: off" if spec.speculation.arms else ""
    raise ConfigError(
        f"rollout.slots: {slots} of {positions} positions each take {_gigabytes(cache)}, and the "
        f"policy {_gigabytes(weights)}, where {device} has {_gigabytes(free)} free ({reason}); "
        f"set policy.max_context, or fewer rollout.slots{off}"
    )


def select_device(device: torch.device) -> None:
    """Make a GPU the one that what names no device uses: Triton kernels, events, communicators."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def free_device_bytes(device: torch.device) -> int | None:
    """Return a GPU's free memory; None for a CPU, which gives memory only when it is written."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
