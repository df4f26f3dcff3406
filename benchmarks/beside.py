"""Measure what rollouts lose while idle workers train the drafter beside them.

`python -m benchmarks.beside --out F.json`

Jobs of 16 answers a worker alternate, with the same seeds: one never trains its drafter, in the
other idle workers always train it. Both start with the same fully trained drafter, so that they
differ only in the training and in the hidden states kept for it.
"""

import argparse
import math
import time
from pathlib import Path
from typing import Any

from benchmarks.e2e import SETTINGS_OF_16, WARM_UP, loss_beside_training
from benchmarks.result import Claim, write_result
from benchmarks.stacks import Job, ratio, run, session
from benchmarks.sweep import best_settings

_STACKS = ("frozen", "forced")
_REPETITIONS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=_REPETITIONS)
    arguments = parser.parse_args()
    out, repetitions = arguments.out, arguments.rounds
    began, jobs = time.monotonic(), {stack: list[Job]() for stack in _STACKS}
    with session():
        run("frozen", 1, *WARM_UP, *best_settings("frozen"))
        for repetition in range(repetitions):
            for stack in _STACKS[:: -1 if repetition % 2 else 1]:
                jobs[stack].append(
                    run(stack, 1 + repetition, *SETTINGS_OF_16, *best_settings(stack))
                )
    slowdown = ratio(jobs["forced"], jobs["frozen"], lambda step: step.rollout)
    beside, less = loss_beside_training(jobs), {"less_is_better": True}
    claims = [
        Claim(name="beside.rollout_slowdown", value=slowdown.value - 1, unit="", bar=0.1, **less),
        Claim(name="beside.while_somebody_trained", value=beside, unit="", bar=0.1, **less),
    ]
    details = {
        "rollout_slowdown": {name: round(value, 3) for name, value in slowdown._asdict().items()},
        "by_seed": {seed: _compare_pair(*pair) for seed, pair in _pairs_by_seed(jobs).items()},
    }
    write_result("beside", claims, details, time.monotonic() - began, out)


def _pairs_by_seed(jobs: dict[str, list[Job]]) -> dict[int, tuple[Job, Job]]:
    frozen = {job.seed: job for job in jobs["frozen"]}
    return {job.seed: (frozen[job.seed], job) for job in jobs["forced"]}


def _compare_pair(frozen: Job, forced: Job) -> dict[str, Any]:
    training = forced.snapshot.drafter_training
    assert training is not None
    return {
        "rollouts": [_rollouts(frozen), _rollouts(forced)],
        "trained_beside": round(training.idle_used, 2),
        "slower_while_somebody_trained": round(
            loss_beside_training({"frozen": [frozen], "forced": [forced]}), 3
        ),
        "saved": [_saved(frozen), _saved(forced)],
    }


def _rollouts(job: Job) -> float:
    return round(math.fsum(step.rollout for step in job.steps), 2)


def _saved(job: Job) -> list[float] | None:
    """Return the ledger's saved device-seconds and their interval."""
    if (saved := job.snapshot.saved) is None:
        return None
    return [round(v, 1) for v in (saved.total.seconds, saved.total.low, saved.total.high)]


if __name__ == "__main__":
    main()
