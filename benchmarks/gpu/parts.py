"""Name the parts of the acceptance, and run one of them in a process of its own.

A part is a module with a context manager `checks(machine)`, which prepares what its checks share, a
server for instance, and yields them by name. A check returns its figures, or raises. What has ended
is written after each check, so that a part that is killed leaves its results.
"""

import importlib
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import torch

Figures = dict[str, Any]
Check = Callable[[], Figures]


class Machine(NamedTuple):
    device: torch.device
    # an empty folder in memory
    folder: Path

    @property
    def has_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Return the type that engines compute in by default."""
        return torch.bfloat16 if self.has_gpu else torch.float32

    def now(self) -> float:
        """Return wall seconds, once the device has done its work."""
        if self.has_gpu:
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class Part(NamedTuple):
    stage: int
    # most seconds
    limit: float


# by the name of its module; the first stage needs no SGLang
PARTS = {
    "native_engine": Part(1, 120),
    "learner": Part(1, 240),
    "drafter_training": Part(1, 120),
    "sglang_engine": Part(2, 240),
    "sglang_speeds": Part(3, 420),
    "duties": Part(3, 240),
    "jobs": Part(3, 300),
}

Status = Literal["passed", "failed", "skipped", "not run"]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    check: str
    status: Status
    seconds: float = 0.0
    figures: Figures = {}
    # error, or reason why it was skipped
    why: str = ""


class Skipped(Exception):
    """A check needs what this machine, or TLT, doesn't have."""


class Failed(Exception):
    """A check found what should not be."""


def require(holds: bool, message: str) -> None:
    if not holds:
        raise Failed(message)


def run_part(name: str, machine: Machine, out: Path) -> None:
    """Run the checks of a part, and write all outcomes so far after each."""
    done = [_begun("preparation")]
    _write(out, done)
    module: Any = importlib.import_module(f"benchmarks.gpu.{name}")
    began = time.monotonic()
    try:
        with module.checks(machine) as checks:
            done = [Outcome(check="preparation", status="passed", seconds=_since(began))]
            for check, run in checks.items():
                _write(out, [*done, _begun(check)])
                done.append(_outcome(check, run))
                print(check, done[-1].status, flush=True)
                _write(out, done)
            done.append(_begun("closing"))
            _write(out, done)
        done.pop()
    except Exception:
        done[-1:] = [_failure(done[-1].check, began)]
    _write(out, done)


def _outcome(check: str, run: Check) -> Outcome:
    began = time.monotonic()
    try:
        figures = run()
    except Skipped as reason:
        return Outcome(check=check, status="skipped", why=str(reason))
    except Exception:
        return _failure(check, began)
    return Outcome(check=check, status="passed", seconds=_since(began), figures=figures)


def _failure(check: str, began: float) -> Outcome:
    traceback.print_exc()
    error = traceback.format_exc().strip().rpartition("\n")[2]
    return Outcome(check=check, status="failed", seconds=_since(began), why=error)


def _begun(check: str) -> Outcome:
    """Return the outcome that stays if the process is killed now."""
    return Outcome(check=check, status="not run")


def _since(began: float) -> float:
    return round(time.monotonic() - began, 2)


def _write(out: Path, outcomes: list[Outcome]) -> None:
    part = out.with_suffix(".new")
    part.write_bytes(msgspec.json.encode(outcomes))
    part.rename(out)
