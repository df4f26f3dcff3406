"""Run parts in this process, one after the other.

An alarm ends the process when a part takes longer than its budget, even if it waits in a kernel.
"""

import gc
import importlib
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.outcomes import Check, Figures, Outcome, Outcomes, Status
from benchmarks.gpu.parts import Part
from tlt.base.child_process import die_with_parent

# a process that has done all parts ends by itself in so many
_LEAVING_SECONDS = 10.0
# threads that share cores with other programs wait for each other
_VARIABLES = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run_parts(parts: Mapping[str, Part], end: float, machine: Machine, file: Path) -> None:
    """Run parts until `end` on the monotonic clock, in a session whose output is a log."""
    os.setsid()
    die_with_parent(signal.SIGKILL)()
    os.environ.update(_VARIABLES)
    outcomes = Outcomes(file, os.dup(1))
    with file.with_suffix(".log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    for name, part in parts.items():
        left = min(part.budget, end - time.monotonic())
        signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3))
        _run_part(name, part, machine, outcomes)
        # the next part has the device to itself
        gc.collect()
        if machine.has_gpu:
            import torch

            torch.cuda.empty_cache()
    signal.setitimer(signal.ITIMER_REAL, _LEAVING_SECONDS)


def _run_part(name: str, part: Part, machine: Machine, outcomes: Outcomes) -> None:
    attempt = partial(_attempt, outcomes, name)
    checks: dict[str, Check] = {}
    with ExitStack() as stack:

        def prepare() -> None:
            module, _, function = part.entry.partition(":")
            enter: Callable[[Machine], AbstractContextManager[Mapping[str, Check]]]
            enter = getattr(importlib.import_module(module), function)
            checks.update(stack.enter_context(enter(machine)))

        attempt("preparation", prepare)
        for check, run in checks.items():
            attempt(check, run)
        attempt("end", stack.close)


def _attempt(
    outcomes: Outcomes, part: str, check: str, action: Callable[[], Figures | None]
) -> None:
    began = time.monotonic()

    def add(status: Status, **more: Any) -> None:
        seconds = round(time.monotonic() - began, 2)
        outcomes.add(Outcome(part=part, check=check, status=status, seconds=seconds, **more))

    print(part, check, flush=True)
    add("begun")
    try:
        add("passed", figures=action() or {})
    except (Exception, SystemExit):
        traceback.print_exc()
        add("failed", why=traceback.format_exc().strip().rpartition("\n")[2])
