"""Measure whole jobs whose steps don't wait for the longest answers (`rollout.partial`).

`python -m benchmarks.partial --out F.json`

Two workers have one core each. Jobs with and without `rollout.partial` take turns with the same
seeds, without speculation and with n-grams. All train on as many groups. Their answers differ,
because some have tokens of two policies, so the seconds of whole jobs are compared, and what the
policies score on the same held-out problems in the end.
"""

import argparse
import math
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.result import Claim, write_result
from benchmarks.stacks import Job, run, session
from benchmarks.sweep import best_settings

_STACKS = ("off", "n-gram")
_SHARES = (0.0, 0.5)
_STEPS, _SEEDS = 12, (1, 2, 3)
_ANSWERS = "algorithm.prompts_per_step=4"
_WARM_UP = (_ANSWERS, "algorithm.steps=1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, default=list(_SEEDS), nargs="+")
    parser.add_argument("--steps", type=int, default=_STEPS)
    arguments = parser.parse_args()
    began = time.monotonic()
    jobs: dict[tuple[str, float], list[Job]] = {}
    with session():
        run("off", 1, *_WARM_UP, *best_settings("off"))
        for seed in arguments.seeds:
            order = [(stack, share) for stack in _STACKS for share in _SHARES]
            for stack, share in order[:: -1 if seed % 2 == 0 else 1]:
                jobs.setdefault((stack, share), []).append(_run(stack, share, seed, arguments))
    claims = [
        Claim(
            name=f"partial.{stack}_whole_over_partial", value=_ratio(jobs, stack), unit="x", bar=1
        )
        for stack in _STACKS
    ]
    details = {f"{stack}, {share}": _account(found) for (stack, share), found in jobs.items()}
    write_result("partial", claims, details, time.monotonic() - began, arguments.out)


def _run(stack: str, share: float, seed: int, arguments: argparse.Namespace) -> Job:
    steps = f"algorithm.steps={arguments.steps}"
    evaluated = f"algorithm.eval_every={arguments.steps}"
    partial = f"rollout.partial={share}"
    return run(stack, seed, steps, evaluated, partial, _ANSWERS, *best_settings(stack))


def _ratio(jobs: dict[tuple[str, float], list[Job]], stack: str) -> float:
    """Return the median of the ratios of jobs of the same seed."""
    pairs = zip(jobs[stack, 0.0], jobs[stack, _SHARES[1]], strict=True)
    return median(_seconds(whole) / _seconds(partial) for whole, partial in pairs)


def _seconds(job: Job) -> float:
    return math.fsum(step.whole for step in job.steps)


def _account(jobs: list[Job]) -> list[dict[str, Any]]:
    return [
        {
            "seed": job.seed,
            "seconds": round(_seconds(job), 1),
            "rollout": round(math.fsum(step.rollout for step in job.steps), 1),
            "tokens": sum(step.tokens for step in job.snapshot.steps),
            "reward": round(mean(step.reward for step in job.snapshot.steps[-3:]), 3),
            "held_out": round(job.snapshot.evals[-1].mean, 3),
        }
        for job in jobs
    ]


if __name__ == "__main__":
    main()
