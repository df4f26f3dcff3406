"""Describe the parts of the acceptance: what each needs, its budget, and the machine it runs on.

A part is a context manager of a module: it takes the machine, prepares what its checks share, and
yields them by name. A check returns its figures, or raises. Budgets bound a part wherever it runs;
those of tier A sum to at most 540 s.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import msgspec

Figures = dict[str, Any]
Check = Callable[[], Figures]
Tier = Literal["A", "B", "C"]
Status = Literal["passed", "failed", "skipped", "not done", "not begun"]


class Part(NamedTuple):
    # module and context manager
    entry: str
    # most seconds, the start of its process included
    budget: float
    # tiers whose packages it needs beside those of tier A
    needs: tuple[Tier, ...] = ()
    # parts of the same process follow each other
    process: str = "native"


_MODULE = "benchmarks.gpu"
# in the order of what they prove
PARTS = {
    "kernels": Part(f"{_MODULE}.kernels:checks", 30),
    "tokens": Part(f"{_MODULE}.tokens:checks", 60),
    "learner": Part(f"{_MODULE}.learner:checks", 150),
    "decoding": Part(f"{_MODULE}.decoding:checks", 60),
    "drafter": Part(f"{_MODULE}.duties:wide_drafter", 100),
    "duties": Part(f"{_MODULE}.duties:native_duties", 130),
    "sglang": Part(f"{_MODULE}.sglang_engine:checks", 240, ("C",), "sglang"),
    "sglang-speeds": Part(f"{_MODULE}.sglang_speeds:checks", 300, ("C",), "sglang-speeds"),
    "sglang-duties": Part(f"{_MODULE}.duties:sglang_duties", 180, ("C",), "sglang-duties"),
    "jobs": Part(f"{_MODULE}.jobs:native", 240, ("B",), "jobs"),
    "sglang-jobs": Part(f"{_MODULE}.jobs:sglang", 300, ("B", "C"), "jobs"),
}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    part: str
    check: str
    status: Status
    seconds: float = 0.0
    figures: Figures = {}
    # error, or reason why it was skipped
    why: str = ""


class Failed(Exception):
    """A check found what should not be."""


def require(holds: bool, message: str) -> None:
    if not holds:
        raise Failed(message)


def beside(measured: float, predicted: float | None) -> dict[str, float | None]:
    """Return a figure with its prediction, both with four digits."""
    return {
        "measured": float(f"{measured:.4g}"),
        "predicted": None if predicted is None else float(f"{predicted:.4g}"),
    }
