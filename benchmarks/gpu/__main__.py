"""Accept TLT on a machine with a GPU and without a network, in some minutes.

`python -m benchmarks.gpu [--out runs/gpu] [--budget 600] [--stages 1 2 3] [--device cpu]`

Stage 1 runs what needs no SGLang: native engine, learner, drafter training. Stage 2 runs SGLang and
stage 3 measures speeds, one device through all duties, and steps of a job. Each part is a process
with a time limit. `DIR/gpu.json` is rewritten after each part, `DIR/gpu.log` holds the last lines
of each. On a CPU all stages run with tiny shapes; what needs a GPU is listed as skipped.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.parts import PARTS, Machine, Outcome, run_part
from benchmarks.result import describe_commit, describe_host

_LOG_LINES = 200
# a part isn't begun with less
_LEAST_SECONDS = 20.0
_GRACE_SECONDS = 5.0
_MEMORY = Path("/dev/shm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), metavar="DIR")
    parser.add_argument("--budget", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("--stages", type=int, nargs="+", choices=(1, 2, 3), default=(1, 2, 3))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--run", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; --device cpu walks through all stages")
    out: Path = arguments.out
    if arguments.run is not None:
        with tempfile.TemporaryDirectory(prefix="tlt-gpu-", dir=_MEMORY) as folder:
            machine = Machine(torch.device(arguments.device), Path(folder))
            run_part(arguments.run, machine, out)
        return
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    found: dict[str, list[Outcome]] = {}
    for name in arguments.parts:
        if PARTS[name].stage not in arguments.stages:
            continue
        left = began + arguments.budget - time.monotonic()
        found[name] = _run_apart(name, arguments.device, left, out)
        _write(out, arguments.device, found, time.monotonic() - began)
        for outcome in found[name]:
            print(f"{name}: {outcome.check}: {outcome.status} {outcome.why}", flush=True)
    _print_table(found)
    statuses = {outcome.status for outcomes in found.values() for outcome in outcomes}
    sys.exit(0 if statuses <= {"passed", "skipped"} else 1)


def _run_apart(name: str, device: str, left: float, out: Path) -> list[Outcome]:
    """Run a part in a process, and end it with all of its children when its time is over."""
    limit = min(PARTS[name].limit, left)
    if limit < _LEAST_SECONDS:
        return [Outcome(check="all", status="not run", why="the budget is spent")]
    command = [sys.executable, "-m", "benchmarks.gpu", "--run", name, "--device", device]
    with tempfile.TemporaryDirectory(prefix="tlt-gpu-") as folder:
        outcomes, log = Path(folder, "outcomes"), Path(folder, "log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, "--out", str(outcomes)],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            why = _wait(process, limit)
        with (out / "gpu.log").open("a") as kept:
            lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
            kept.write("\n".join([f"===== {name}", *lines, ""]))
        if not outcomes.exists():
            return [Outcome(check="start", status="failed", why=why or lines[-1])]
        done = msgspec.json.decode(outcomes.read_bytes(), type=list[Outcome])
    if why and done[-1].status == "not run":
        done[-1] = msgspec.structs.replace(done[-1], status="failed", why=why)
    return done


def _wait(process: "subprocess.Popen[bytes]", limit: float) -> str:
    """Wait for the end; return why a part ended early, if it did."""
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        # its children end with it; whatever it held in memory is removed on a polite signal
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.send_signal(signal.SIGINT)
            process.wait(_GRACE_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"not done after {limit:.0f} s"
    return f"the process ended with {status}" if status else ""


def _write(out: Path, device: str, found: dict[str, list[Outcome]], seconds: float) -> None:
    result: dict[str, Any] = {
        "name": "gpu",
        "commit": describe_commit(),
        "host": describe_host(),
        "device": device,
        "seconds": round(seconds, 1),
        "parts": found,
    }
    part = out / "gpu.json.new"
    part.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    part.rename(out / "gpu.json")


def _print_table(found: dict[str, list[Outcome]]) -> None:
    table = Table("part", "check", "status", "seconds", "figures, or why", box=None)
    for name, outcomes in found.items():
        for outcome in outcomes:
            what = outcome.why or msgspec.json.encode(outcome.figures).decode()
            table.add_row(name, outcome.check, outcome.status, f"{outcome.seconds:.1f}", what)
    Console().print(table)


if __name__ == "__main__":
    main()
