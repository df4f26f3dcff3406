"""Compare a job that replaces groups that agree with one that doesn't.

`python -m benchmarks.dynamic_sampling --out F.json`

Preset dapo on the tiny reasoner, 16 prompts of 8 answers, the same seed. A group is saved if an
update learns from it that wouldn't have without its replacement.
"""

import argparse
import time
from pathlib import Path
from statistics import fmean

from benchmarks.result import Claim, write_result
from benchmarks.stacks import ROOT, Job, run, session

_SPEC = ROOT / "configs" / "tiny-reasoner.yaml"
_STEPS, _PROMPTS = 8, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    began = time.monotonic()
    with session():
        jobs = {name: _job(name == "on") for name in ("off", "on")}
    cost = fmean(step.extra_share for step in jobs["on"].snapshot.steps)
    shares = {name: fmean(_useful(job)) / _PROMPTS for name, job in jobs.items()}
    saved = shares["on"] - shares["off"]
    claims = [
        Claim(
            name="dynamic_sampling.cost_by_saved",
            value=cost / saved,
            unit="share of decode seconds, by the share of groups saved",
            bar=1.0,
            less_is_better=True,
        )
    ]
    details = {
        "extra_share_of_decode_seconds": round(cost, 4),
        "share_of_groups_saved": round(saved, 4),
        "groups_that_differ_by_step": {name: _useful(job) for name, job in jobs.items()},
        "groups_replaced_by_step": [step.replaced_groups for step in jobs["on"].snapshot.steps],
        "rollout_seconds": {
            name: round(sum(step.rollout for step in job.steps), 1) for name, job in jobs.items()
        },
        "held_out": {
            name: [round(done.mean, 4) for done in job.snapshot.evals] for name, job in jobs.items()
        },
    }
    write_result("dynamic_sampling", claims, details, time.monotonic() - began, out)


def _job(dynamic: bool) -> Job:
    return run(
        "cold",
        1,
        "algorithm.preset=dapo",
        f"algorithm.dynamic_sampling={str(dynamic).lower()}",
        f"algorithm.steps={_STEPS}",
        f"algorithm.eval_every={_STEPS}",
        f"algorithm.prompts_per_step={_PROMPTS}",
        "algorithm.group_size=8",
        spec=_SPEC,
    )


def _useful(job: Job) -> list[int]:
    """Return how many groups each update learned from."""
    groups = job.snapshot.steps
    return [_PROMPTS + step.replaced_groups - step.uniform_groups for step in groups]


if __name__ == "__main__":
    main()
