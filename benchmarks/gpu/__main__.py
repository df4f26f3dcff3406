"""Accept TLT on a machine with a GPU and without a network, in some minutes.

`python -m benchmarks.gpu [--tier A|B|C] [--device cpu] [--out runs/gpu] [--budget 600]`
`python -m benchmarks.gpu --pack DIR [--tier C] [--python 3.12]`

Tier A needs PyTorch, Transformers and two small wheels: kernels, native engine, learner, drafter
training and duties. B adds Ray and Redis, and jobs. C adds SGLang. By default all run that the
machine has the packages for. `DIR/gpu.jsonl` gets a line for each check, with a prediction beside
each figure; `DIR/gpu.log` holds the output. On a CPU the same checks run with tiny shapes.

`--pack` gathers wheels for a machine without a network: what tier A lacks, or all of SGLang.
"""

import argparse
import sys
from pathlib import Path

import msgspec

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.outcomes import Outcome, Outcomes
from benchmarks.gpu.pack import pack
from benchmarks.gpu.parts import PARTS, complaint, look, parts_of
from benchmarks.gpu.supervisor import Supervisor, memory_folder
from benchmarks.result import describe_commit, describe_host

# weights and deltas of the largest part
_GPU_BYTES = 16 << 30


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.pack is not None:
        pack(arguments.pack, arguments.tier or "A", arguments.python)
        return
    device, out, box = arguments.device, arguments.out, look(arguments.device)
    if (why := complaint(box)) is not None:
        sys.exit(f"tier A doesn't run here: {why}")
    host, tier = describe_host(), arguments.tier or box.tier
    if device == "cuda" and host["gpu"] is None:
        sys.exit("nvidia-smi names no GPU here; --device cpu walks through all parts")
    runs, lacks = parts_of(tier, box)
    facts = {"commit": describe_commit(), "host": host, "device": device, **box._asdict()}
    facts |= {"tier": tier, "budgets": {name: part.budget for name, part in runs.items()}}
    out.mkdir(parents=True, exist_ok=True)
    outcomes = Outcomes(out / "gpu.jsonl")
    outcomes.file.write_bytes(msgspec.json.encode(facts) + b"\n")
    print(f"tier {tier}, {host['gpu'] or 'no GPU'}; missing: {box.missing}", flush=True)
    for name, why in lacks.items():
        outcomes.add(Outcome(part=name, check="all", status="skipped", why=why))
    wanted = {name: part for name, part in runs.items() if name in arguments.parts}
    if not wanted:
        sys.exit(f"none of {', '.join(arguments.parts)} runs in tier {tier} here")
    with memory_folder(_GPU_BYTES if device == "cuda" else 0) as folder:
        Supervisor(Machine(device, folder), outcomes).run(wanted, arguments.budget)
    sys.exit({"failed", "not begun"} & {outcome.status for outcome in outcomes.read()} != set())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tier", choices=("A", "B", "C"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), metavar="DIR")
    parser.add_argument("--budget", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--pack", type=Path, metavar="DIR")
    parser.add_argument("--python", choices=("3.11", "3.12"), default="3.12")
    return parser


if __name__ == "__main__":
    main()
