"""Compute all cases with the peers' own code; runs in the peers' environment.

`python -m benchmarks.peer_outputs FILE` writes losses and gradients, or values, as JSON.
"""

import json
import sys
import warnings
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.peer_cases import CASES, Case
from benchmarks.peer_inputs import SEED, make_inputs
from benchmarks.peer_tensors import pad_inputs


def main() -> None:
    warnings.simplefilter("ignore")
    found = {
        "seed": SEED,
        "versions": {name: version(name) for name in ("trl", "verl", "torch")},
        "cases": {case.key: _compute(case) for case in CASES},
    }
    Path(sys.argv[1]).write_text(json.dumps(found, separators=(",", ":")) + "\n")


def _compute(case: Case) -> dict[str, Any]:
    """Return the loss and its gradient by the logits of each token, or other values."""
    padded = pad_inputs(make_inputs())
    call = import_module(f"benchmarks.peer_{case.peer}").CALLS[case.call]
    result: Tensor | list[float] = call(padded, case.mismatch, **case.theirs)
    if isinstance(result, list):
        return {"values": result}
    (gradient,) = torch.autograd.grad(result, padded.logits)
    return {"loss": result.item(), "values": gradient.flatten().tolist()}


if __name__ == "__main__":
    main()
