"""Measure what answers cost that wait for a tool, and what their slots do meanwhile.

`python -m benchmarks.environments --out F.json`

One worker writes 256 answers of up to eight turns with 16 slots. In one job of a pair each turn's
environment waits two seconds, in the other one it doesn't. The same seed gives the same answers, so
the ratio of the rollouts' seconds is the share of the time in which slots are as busy as they would
be without waiting; if answers that wait held their slots, it would be below a fifth.
"""

import argparse
import math
import time
from pathlib import Path
from statistics import median

from benchmarks.result import Claim, write_result
from benchmarks.stacks import ROOT, Job, run, session

_FILE = ROOT / "benchmarks" / "waiting_environment.py"
_TURNS, _SLOTS = 8, 16
_JOB = (
    "algorithm.steps=1",
    "algorithm.prompts_per_step=16",
    "algorithm.eval_every=0",
    f"rollout.slots={_SLOTS}",
    # ends each step of a worked sum
    "rollout.stop=[';']",
    f"environment.max_turns={_TURNS}",
    "reward.kind=environment",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, default=[1, 2, 3], nargs="+")
    arguments = parser.parse_args()
    began = time.monotonic()
    jobs: list[tuple[Job, Job]] = []
    with session(workers=1):
        for seed in arguments.seeds:
            instant, waiting = (_run(name, seed) for name in ("Instant", "Waiting"))
            jobs.append((instant, waiting))
            if _tokens(instant) != _tokens(waiting):
                raise SystemExit(f"seed {seed}: the answers differ")
    shares = [_seconds(instant) / _seconds(waiting) for instant, waiting in jobs]
    claims = [
        Claim(name="environments.busy", value=round(median(shares), 3), unit="of slots", bar=0.8)
    ]
    details = {
        "seconds": [[round(_seconds(job), 1) for job in pair] for pair in jobs],
        "tokens": [_tokens(instant) for instant, _ in jobs],
    }
    write_result("environments", claims, details, time.monotonic() - began, arguments.out)


def _run(name: str, seed: int) -> Job:
    return run("off", seed, *_JOB, f"environment.factory={_FILE}:{name}")


def _seconds(job: Job) -> float:
    return math.fsum(step.rollout for step in job.steps)


def _tokens(job: Job) -> int:
    return sum(step.tokens for step in job.snapshot.steps)


if __name__ == "__main__":
    main()
