"""Whether what is trained with TLT is as good as what is trained without.

`python -m benchmarks.accuracy --out F.json`

Pairs of jobs with the same seed, one decoding without speculation, one with all of TLT from a cold
drafter, each evaluated on the same held-out problems after its last step.
"""

import argparse
import math
import random
import time
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

from benchmarks.result import Claim, write_result
from benchmarks.stacks import Job, run, session
from benchmarks.sweep import best_settings

_SEEDS, _STEPS, _PROBLEMS = (1, 2, 3, 4), 12, 512
_WITHIN = 4.0
_RESAMPLES = 4000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    began = time.monotonic()
    pairs: list[tuple[Job, Job]] = []
    with session():
        for index, seed in enumerate(_SEEDS):
            order = ("off", "cold")[:: -1 if index % 2 else 1]
            jobs = {stack: _job(stack, seed) for stack in order}
            pairs.append((jobs["off"], jobs["cold"]))
    differences = [100 * (_after(off) - _after(tlt)) for off, tlt in pairs]
    low, high = _interval(pairs)
    claims = [
        Claim(
            name="accuracy.off_minus_tlt",
            value=max(abs(low), abs(high)),
            unit="points from zero, the farther end of the interval",
            bar=_WITHIN,
            less_is_better=True,
        )
    ]
    details: dict[str, Any] = {
        "seeds": _SEEDS,
        "difference_in_points": differences,
        "mean": fmean(differences),
        "interval": (low, high),
        "before_and_after": {
            "off": [[e.mean for e in off.snapshot.evals] for off, _ in pairs],
            "tlt": [[e.mean for e in tlt.snapshot.evals] for _, tlt in pairs],
        },
        "problems": _PROBLEMS,
        "steps": _STEPS,
    }
    write_result("accuracy", claims, details, time.monotonic() - began, out)


def _job(stack: str, seed: int) -> Job:
    return run(
        stack,
        seed,
        f"algorithm.steps={_STEPS}",
        f"algorithm.eval_every={_STEPS}",
        f"data.eval_limit={_PROBLEMS}",
        *best_settings(stack),
    )


def _after(job: Job) -> float:
    return job.snapshot.evals[-1].mean


def _interval(pairs: list[tuple[Job, Job]]) -> tuple[float, float]:
    """Of the mean difference: seeds are drawn again, and each side's problems as its error says."""
    dice = random.Random(1)
    means: list[float] = []
    for _ in range(_RESAMPLES):
        drawn = dice.choices(pairs, k=len(pairs))
        means.append(fmean(100 * (_again(dice, off) - _again(dice, tlt)) for off, tlt in drawn))
    cuts = quantiles(means, n=40)
    return cuts[0], cuts[-1]


def _again(dice: random.Random, job: Job) -> float:
    last = job.snapshot.evals[-1]
    return dice.gauss(last.mean, math.sqrt(last.mean * (1 - last.mean) / last.problems))


if __name__ == "__main__":
    main()
