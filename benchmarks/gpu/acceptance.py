"""Run the parts of a tier that this machine has the packages for, and keep their outcomes."""

import sys
from argparse import Namespace

import msgspec

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.outcomes import Outcome, Outcomes, keep_earlier
from benchmarks.gpu.parts import Box, parts_of
from benchmarks.gpu.supervisor import Supervisor, memory_folder
from benchmarks.result import describe_commit, describe_host

# weights and deltas of the largest part
_GPU_BYTES = 16 << 30


def accept(arguments: Namespace, box: Box) -> None:
    """Exit with an error if a check fails or isn't begun."""
    device, out = arguments.device, arguments.out
    host, tier = describe_host(), arguments.tier or box.tier
    if device == "cuda" and host["gpu"] is None:
        sys.exit("nvidia-smi names no GPU here; --device cpu walks through all parts")
    runs, lacks = parts_of(tier, box)
    facts = {"commit": describe_commit(), "host": host, "device": device, **box._asdict()}
    facts |= {"tier": tier, "budgets": {name: part.budget for name, part in runs.items()}}
    out.mkdir(parents=True, exist_ok=True)
    outcomes = Outcomes(out / "gpu.jsonl")
    keep_earlier(outcomes.file)
    outcomes.file.write_bytes(msgspec.json.encode(facts) + b"\n")
    print(f"tier {tier}, {host['gpu'] or 'no GPU'}; missing: {box.missing}", flush=True)
    for name, why in lacks.items():
        outcomes.add(Outcome(part=name, check="all", status="skipped", why=why))
    wanted = {name: part for name, part in runs.items() if name in arguments.parts}
    if not wanted:
        sys.exit(f"none of {', '.join(arguments.parts)} runs in tier {tier} here")
    budget = arguments.budget or sum(part.budget for part in wanted.values())
    with memory_folder(_GPU_BYTES if device == "cuda" else 0) as folder:
        Supervisor(Machine(device, folder), outcomes).run(wanted, budget)
    sys.exit({"failed", "not begun"} & {outcome.status for outcome in outcomes.read()} != set())
