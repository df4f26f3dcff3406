"""Train the tiny reasoner with each `algorithm.preset`, and evaluate it before and after.

`python -m benchmarks.presets --out F.json [--only NAME ...]`

All jobs have the same seed, prompts and steps, four minibatches, and the values of their papers;
only the learning rate is this model's. `clipped` is the share of tokens on which a bound acted;
SAPO has none. With `--only`, the others' figures are taken from F.json.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.result import Claim, describe_commit, write_result
from benchmarks.stacks import ROOT, run, session
from tlt.spec.algorithm_presets import PRESETS

_SPEC = ROOT / "configs" / "tiny-reasoner.yaml"
_STEPS, _BAR = 12, 10.0
_RATE = 3e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", choices=PRESETS, default=list(PRESETS))
    arguments = parser.parse_args()
    began = time.monotonic()
    found: dict[str, dict[str, Any]] = {}
    if len(arguments.only) < len(PRESETS):
        found = json.loads(arguments.out.read_bytes())["details"]["presets"]
    with session():
        for preset in arguments.only:
            found[preset] = _train(preset)
            print(preset, found[preset], flush=True)
    claims = [
        Claim(name=f"presets.{name}", value=row["gain"], unit="points", bar=_BAR)
        for name, row in found.items()
    ]
    details = {"presets": {name: found[name] for name in PRESETS if name in found}}
    write_result("presets", claims, details, time.monotonic() - began, arguments.out)


def _train(preset: str) -> dict[str, Any]:
    job = run(
        "cold",
        1,
        f"algorithm.preset={preset}",
        f"algorithm.steps={_STEPS}",
        "algorithm.minibatches=4",
        f"algorithm.eval_every={_STEPS}",
        f"algorithm.learning_rate={_RATE}",
        "algorithm.group_size=8",
        spec=_SPEC,
    )
    first, last = job.snapshot.evals[0], job.snapshot.evals[-1]
    steps = [step for step in job.snapshot.steps if step.metrics is not None]
    clipped = [m.clipped_low + m.clipped_high for s in steps if (m := s.metrics) is not None]
    return {
        "before": round(first.mean, 4),
        "after": round(last.mean, 4),
        "standard_error": round(last.stderr, 4),
        "gain": round(100 * (last.mean - first.mean), 2),
        "learning_rate": _RATE,
        "clipped": round(sum(clipped) / len(clipped), 4),
        "commit": describe_commit()[:8],
    }


if __name__ == "__main__":
    main()
