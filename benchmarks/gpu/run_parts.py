"""Run parts in this process, one after the other, and report each outcome as soon as it is known.

`python -m benchmarks.gpu.run_parts SETUP`; the supervisor reads a line of JSON for each outcome,
and one before a check begins.
"""

import gc
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.parts import Check, Outcome, Status

Report = Callable[[Outcome], None]


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    # entries by the names of the parts
    parts: dict[str, str]
    device: str
    folder: str
    # where outcomes are written to
    descriptor: int


def main() -> None:
    setup = msgspec.json.decode(sys.argv[1], type=Setup)
    machine = Machine(setup.device, Path(setup.folder))

    def report(outcome: Outcome) -> None:
        os.write(setup.descriptor, msgspec.json.encode(outcome, enc_hook=_plain) + b"\n")

    for name, entry in setup.parts.items():
        run_part(name, entry, machine, report)
        # the next part has the device to itself
        gc.collect()
        if machine.has_gpu:
            import torch

            torch.cuda.empty_cache()


def _plain(value: Any) -> Any:
    """Return a number of NumPy's as one of Python's, and the text of anything else."""
    return value.item() if hasattr(value, "item") else str(value)


def run_part(name: str, entry: str, machine: Machine, report: Report) -> None:
    module, _, function = entry.partition(":")
    began, check = time.monotonic(), "preparation"

    def say(status: Status, **more: Any) -> None:
        print(name, check, status, flush=True)
        report(Outcome(part=name, check=check, status=status, **more))

    say("not done")
    try:
        checks: Callable[[Machine], AbstractContextManager[Mapping[str, Check]]]
        checks = getattr(importlib.import_module(module), function)
        with checks(machine) as prepared:
            say("passed", seconds=_since(began))
            for check, run in prepared.items():
                say("not done")
                report(_outcome(name, check, run))
            check = "end"
    except Exception:
        report(_failure(name, check, began))


def _outcome(part: str, check: str, run: Check) -> Outcome:
    began = time.monotonic()
    try:
        figures = run()
    except Exception:
        return _failure(part, check, began)
    seconds = _since(began)
    return Outcome(part=part, check=check, status="passed", seconds=seconds, figures=figures)


def _failure(part: str, check: str, began: float) -> Outcome:
    traceback.print_exc()
    why = traceback.format_exc().strip().rpartition("\n")[2]
    return Outcome(part=part, check=check, status="failed", seconds=_since(began), why=why)


def _since(began: float) -> float:
    return round(time.monotonic() - began, 2)


if __name__ == "__main__":
    main()
