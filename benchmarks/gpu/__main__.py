"""Accept TLT on a machine with a GPU and without a network, in some minutes.

`python -m benchmarks.gpu [--tier A|B|C] [--device cpu] [--out runs/gpu] [--budget 600]`
`python -m benchmarks.gpu --pack DIR [--tier C] [--python 3.12]`

Tier A needs PyTorch, Transformers and two small wheels: kernels, native engine, learner, drafter
training and duties. B adds Ray and Redis, and jobs. C adds SGLang. By default all run that the
machine has the packages for. `DIR/gpu.json` is rewritten after each check, with a prediction beside
each figure; `DIR/gpu.log` holds the output. On a CPU the same checks run with tiny shapes.

`--pack` gathers wheels for a machine without a network: what tier A lacks, or all of SGLang.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.pack import pack
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.supervisor import Results, Supervisor
from benchmarks.gpu.tiers import complaint, look, parts_of
from benchmarks.result import describe_commit, describe_host

_MEMORY = Path("/dev/shm")


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.pack is not None:
        pack(arguments.pack, arguments.tier or "A", arguments.python)
        return
    device, out, host = arguments.device, arguments.out, describe_host()
    if device == "cuda" and host["gpu"] is None:
        sys.exit("nvidia-smi names no GPU here; --device cpu walks through all parts")
    box = look(device)
    if (why := complaint(box)) is not None:
        sys.exit(f"tier A doesn't run here: {why}")
    tier = arguments.tier or box.tier
    runs, lacks = parts_of(tier, box)
    out.mkdir(parents=True, exist_ok=True)
    facts = {"name": "gpu", "commit": describe_commit(), "host": host, "device": device}
    facts |= {"tier": tier, "versions": box.versions, "missing": box.missing}
    facts["budgets"] = {name: part.budget for name, part in runs.items()}
    print(f"tier {tier}, {host['gpu'] or 'no GPU'}; missing: {box.missing}", flush=True)
    results = Results(out / "gpu.json", facts)
    for name, why in lacks.items():
        results.add_all([name], "skipped", why)
    wanted = {name: part for name, part in runs.items() if name in arguments.parts}
    with tempfile.TemporaryDirectory(prefix="tlt-gpu-", dir=_memory()) as folder:
        supervisor = Supervisor(device, Path(folder), out / "gpu.log", results)
        supervisor.run(wanted, arguments.budget)
    sys.exit(0 if {o.status for o in results.outcomes} <= {"passed", "skipped"} else 1)


def _memory() -> Path | None:
    return _MEMORY if _MEMORY.is_dir() else None


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
