"""Accept TLT on a machine with a GPU and without a network, in some minutes.

`python -m benchmarks.gpu [--tier A|B|C] [--device cpu] [--out runs/gpu] [--budget SECONDS]`
`python -m benchmarks.gpu --pack DIR [--tier C] [--python 3.12]`

Tier A needs PyTorch, Transformers and two small wheels: kernels, native engine, learner, drafter
training and duties. B adds Ray and Redis, and jobs. C adds SGLang. By default all run that the
machine has the packages for. `DIR/gpu.jsonl` gets a line for each check, with a prediction beside
each figure; `DIR/gpu.log` holds the output. `--budget` bounds the whole run; by default it takes as
long as its parts may, tier A nine minutes and all half an hour. On a CPU shapes are tiny.

`--pack` gathers wheels for a machine without a network: what tier A lacks, or all of SGLang.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.gpu.pack import pack
from benchmarks.gpu.parts import PARTS, complaint, look


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.pack is not None:
        pack(arguments.pack, arguments.tier or "A", arguments.python)
        return
    box = look(arguments.device)
    if (why := complaint(box, tier := arguments.tier or "A")) is not None:
        sys.exit(f"tier {tier} doesn't run here: {why}")
    # it imports what may be missing
    from benchmarks.gpu.acceptance import accept

    accept(arguments, box)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tier", choices=("A", "B", "C"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), metavar="DIR")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="default: all parts'")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--pack", type=Path, metavar="DIR")
    parser.add_argument("--python", choices=("3.11", "3.12"), default="3.12")
    return parser


if __name__ == "__main__":
    main()
