"""Measure whole jobs that start without a drafter: what training one on the way is worth.

`python -m benchmarks.cold --out F.json`

Two workers have one core each and 32 answers. The stacks decode without speculation, with n-grams
alone, with a drafter that idle workers train while evaluations get better, and with one that they
always train. Stacks alternate with the same seeds, in reversed order every other time. A step's
seconds are those of its rollout and those until the new policy is published.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.result import Claim, write_result
from benchmarks.stacks import Job, Ratio, StepTime, ratio, run, session
from benchmarks.sweep import best_settings

_STACKS = ("off", "n-gram", "cold", "idle-only")
_ANSWERS = "algorithm.prompts_per_step=4"
_STEPS, _FEW_STEPS = 30, 8
_SEEDS = (1, 2)
# a session's first job also fills caches, so it is not counted
_WARM_UP = (_ANSWERS, "algorithm.steps=1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, default=list(_SEEDS), nargs="+")
    arguments = parser.parse_args()
    began = time.monotonic()
    few, many = dict[str, list[Job]](), dict[str, list[Job]]()
    with session():
        run("off", 1, *_WARM_UP, *best_settings("off"))
        for seed in arguments.seeds:
            _take_turn(many, seed, _STEPS)
            _take_turn(few, seed, _FEW_STEPS)
    claims = [
        _claim("cold.off_over_tlt", _ratio(many, "off"), 1.4),
        _claim("cold.ngram_over_tlt", _ratio(many, "n-gram"), 1.1),
        _claim("cold.idle_only_over_tlt", _ratio(many, "idle-only"), 0.97),
        _claim("cold.few_steps_off_over_tlt", _ratio(few, "off"), 0.97),
        _claim("cold.few_steps_idle_only_over_tlt", _ratio(few, "idle-only"), 0.97),
    ]
    details = {f"{_STEPS} steps": _account(many), f"{_FEW_STEPS} steps": _account(few)}
    write_result("cold", claims, details, time.monotonic() - began, arguments.out)


def _take_turn(jobs: dict[str, list[Job]], seed: int, steps: int) -> None:
    for stack in _STACKS[:: -1 if seed % 2 == 0 else 1]:
        job = run(stack, seed, f"algorithm.steps={steps}", _ANSWERS, *best_settings(stack))
        jobs.setdefault(stack, []).append(job)


def _ratio(jobs: Mapping[str, list[Job]], stack: str) -> Ratio:
    return ratio(jobs[stack], jobs["cold"], _whole)


def _whole(step: StepTime) -> float:
    return step.whole


def _rollout(step: StepTime) -> float:
    return step.rollout


def _claim(name: str, found: Ratio, bar: float) -> Claim:
    return Claim(name=name, value=found.value, unit="x", bar=bar)


def _account(jobs: Mapping[str, list[Job]]) -> dict[str, Any]:
    return {
        stack: {
            "over_tlt": _rounded(_ratio(jobs, stack)),
            "rollout_over_tlt": _rounded(ratio(found, jobs["cold"], _rollout)),
            "steps": [
                [(round(s.rollout, 2), round(s.rest, 2)) for s in job.steps] for job in found
            ],
            "saved": [_saved(job) for job in found],
            "evaluations": [_evaluations(job) for job in found],
        }
        for stack, found in jobs.items()
    }


def _saved(job: Job) -> Sequence[float] | None:
    """Return the rank seconds that the ledger claims, with their interval."""
    if job.snapshot.savings is None:
        return None
    total = job.snapshot.savings.total
    return [round(seconds, 1) for seconds in (total.seconds, total.low, total.high)]


def _evaluations(job: Job) -> list[tuple[int, int, float]]:
    training = job.snapshot.drafter_training
    found = () if training is None else training.evaluations
    return [(each.step, each.micro_batches, round(each.accept_length, 2)) for each in found]


def _rounded(found: Ratio) -> dict[str, float]:
    return {name: round(value, 3) for name, value in found._asdict().items()}


if __name__ == "__main__":
    main()
