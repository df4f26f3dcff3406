"""Compare whole jobs of SmolLM2-135M without speculation and with everything at its default.

`python -m benchmarks.real_model --out F.json [--steps 6] [--seeds 1 2 3] [--tasks short]`

Two workers have one core each. One task has short answers, one answers of up to 200 tokens; jobs of
a pair have the same seed and follow each other, in reversed order every other time. The model is
made in TLT's home if it isn't there. The share of answers that ended by themselves is told, because
repetition flatters every drafter.
"""

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.result import Claim, at_most, write_result
from benchmarks.stacks import ROOT, Job, run, session
from examples.smollm2.prepare import prepare

_SPEC = ROOT / "examples" / "smollm2" / "job.yaml"
_STACKS = ("off", "default")
_WORD_PROBLEMS = "reasoning_gym:gsm_symbolic?seed=1&size=2000"
_TASKS: dict[str, tuple[str, ...]] = {
    "short": (),
    "long": (
        f"data.train={_WORD_PROBLEMS}",
        "data.eval=null",
        "policy.max_context=512",
        "rollout.max_new_tokens=200",
    ),
}
_COMMON = (
    "algorithm.prompts_per_step=4",
    "algorithm.eval_every=0",
    "rollout.slots=auto",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=[1, 2, 3], nargs="+")
    parser.add_argument("--tasks", choices=list(_TASKS), default=list(_TASKS), nargs="+")
    arguments = parser.parse_args()
    began = time.monotonic()
    common = (*_COMMON, f"policy.path={prepare(print)}", f"algorithm.steps={arguments.steps}")
    jobs = {task: {stack: list[Job]() for stack in _STACKS} for task in arguments.tasks}
    with session():
        # a session's first job also fills caches
        run("off", 9, *common, "algorithm.steps=1", spec=_SPEC)
        for seed in arguments.seeds:
            for task in arguments.tasks:
                for stack in _STACKS[:: -1 if seed % 2 == 0 else 1]:
                    jobs[task][stack].append(run(stack, seed, *common, *_TASKS[task], spec=_SPEC))
    claims = [claim for task, found in jobs.items() for claim in _claims(task, found)]
    details = {task: _describe(found) for task, found in jobs.items()}
    write_result("real_model", claims, details, time.monotonic() - began, arguments.out)


def _claims(task: str, jobs: Mapping[str, Sequence[Job]]) -> list[Claim]:
    ratios = _ratios(jobs)
    wide = [_half_width(job) for job in jobs["default"]]
    return [
        Claim(
            name=f"real_model.{task}.off_over_tlt",
            value=round(median(ratios), 3),
            unit="x",
            bar=0.97,
        ),
        at_most(f"real_model.{task}.half_width_of_savings", median(wide), "of rollouts", 0.05),
    ]


def _ratios(jobs: Mapping[str, Sequence[Job]]) -> list[float]:
    """Return, for each pair, the seconds without speculation by those with it."""
    pairs = zip(jobs["off"], jobs["default"], strict=True)
    return [round(_seconds(off) / _seconds(other), 3) for off, other in pairs]


def _seconds(job: Job) -> float:
    return math.fsum(step.whole for step in job.steps)


def _half_width(job: Job) -> float:
    """Return it as a share of what rollouts would have taken; all of that if nothing is known."""
    saved = job.snapshot.savings
    return 1.0 if saved is None else (saved.total.high - saved.total.low) / 2 / saved.plain_seconds


def _describe(jobs: Mapping[str, Sequence[Job]]) -> dict[str, Any]:
    return {
        "off_over_tlt": _ratios(jobs),
        **{stack: [_describe_job(job) for job in found] for stack, found in jobs.items()},
    }


def _describe_job(job: Job) -> dict[str, Any]:
    saved, trained = job.snapshot.savings, job.snapshot.drafter_training
    return {
        "seed": job.seed,
        "rollout": [round(step.rollout, 2) for step in job.steps],
        "rest": [round(step.rest, 2) for step in job.steps],
        "ended_by_themselves": [round(1 - step.truncated, 2) for step in job.snapshot.steps],
        "rewards": [round(step.reward, 3) for step in job.snapshot.steps],
        "savings": None
        if saved is None
        else [round(each, 1) for each in (saved.total.seconds, saved.total.low, saved.total.high)],
        "accept_lengths": []
        if trained is None
        else [round(each.accept_length, 2) for each in trained.evaluations],
        "idle_used": None if trained is None else round(trained.idle_used, 1),
    }


if __name__ == "__main__":
    main()
