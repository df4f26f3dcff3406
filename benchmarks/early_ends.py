"""Measure whole jobs whose steps don't wait for the longest answers.

`python -m benchmarks.early_ends --out F.json [--stacks off n-gram] [--modes ahead] [--add F.json]`

Two workers have one core each. Jobs whose steps wait for all answers, cut the longest ones
(`rollout.partial`), put them off (`rollout.defer_long`) or overlap (`algorithm.staleness`) take
turns with the same seeds. All make as many updates with as many groups. Their answers differ, so
the seconds of whole jobs are compared, and what the policies score on the same held-out problems in
the end. The jobs that wait for all answers also forecast, by `tlt simulate`, how much faster the
others are. `--add` takes over the other modes of an earlier result.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean, median
from typing import Any

import msgspec
from msgspec.structs import replace

from benchmarks.result import Claim, at_most, write_result
from benchmarks.stacks import Job, run, session
from benchmarks.sweep import best_settings
from cli.simulate import read_fit
from tlt.simulation.comparison import simulate
from tlt.simulation.job import Mode

_STACKS = ("off", "n-gram")
_WHOLE = "whole"
_SURPLUS = 0.5
_MODES = {
    _WHOLE: (),
    "partial": (f"rollout.partial={_SURPLUS}",),
    "deferred": (f"rollout.defer_long={_SURPLUS}",),
    "ahead": ("algorithm.staleness=1",),
}
_SIMULATED = {
    _WHOLE: Mode(),
    "partial": Mode(partial=_SURPLUS),
    "deferred": Mode(defer_long=_SURPLUS),
    "ahead": Mode(ahead=True),
}
# of a forecast: many, because few steps vary
_FORECAST_STEPS = 96
_STEPS, _SEEDS = 12, (1, 2, 3)
_ANSWERS = ("algorithm.prompts_per_step=4", "data.eval_limit=256")
_WARM_UP = (*_ANSWERS, "algorithm.steps=1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, default=list(_SEEDS), nargs="+")
    parser.add_argument("--stacks", choices=_STACKS, default=["off"], nargs="+")
    parser.add_argument("--steps", type=int, default=_STEPS)
    parser.add_argument("--modes", choices=list(_MODES)[1:], default=list(_MODES)[1:], nargs="+")
    parser.add_argument("--add", type=Path)
    arguments = parser.parse_args()
    began = time.monotonic()
    jobs: dict[tuple[str, str], list[Job]] = {}
    with session():
        run("off", 1, *_WARM_UP, *best_settings("off"))
        for seed in arguments.seeds:
            order = [
                (stack, mode) for stack in arguments.stacks for mode in (_WHOLE, *arguments.modes)
            ]
            for stack, mode in order[:: -1 if seed % 2 == 0 else 1]:
                found = jobs.setdefault((stack, mode), [])
                found.append(_run(stack, mode, seed, arguments.steps))
        # while the runs' folders exist
        claims = [claim for stack in arguments.stacks for claim in _stack_claims(jobs, stack)]
    details: dict[str, Any] = {
        f"{stack}, {mode}": _account(found) for (stack, mode), found in jobs.items()
    }
    if arguments.add is not None:
        earlier = json.loads(arguments.add.read_bytes())
        claims = [*msgspec.convert(earlier["claims"], list[Claim]), *claims]
        details["earlier"] = {each: earlier[each] for each in ("commit", "host", "details")}
    write_result("early_ends", claims, details, time.monotonic() - began, arguments.out)


def _run(stack: str, mode: str, seed: int, steps: int) -> Job:
    changes = (f"algorithm.steps={steps}", f"algorithm.eval_every={steps}", *_ANSWERS)
    return run(stack, seed, *changes, *_MODES[mode], *best_settings(stack))


def _stack_claims(jobs: Mapping[tuple[str, str], list[Job]], stack: str) -> Iterator[Claim]:
    whole = jobs[stack, _WHOLE]
    for mode in [each for known, each in jobs if known == stack and each != _WHOLE]:
        name, early = f"early_ends.{stack}_{mode}", jobs[stack, mode]
        yield from _claims(name, whole, early)
        if stack == "off":
            yield _forecast_claim(f"{name}.forecast_error", whole, early, mode)


def _claims(name: str, whole: list[Job], early: list[Job]) -> list[Claim]:
    """Compare jobs of the same seeds: their seconds, and what they have learned."""
    ratio = median(_seconds(w) / _seconds(e) for w, e in zip(whole, early, strict=True))
    gains = [e.snapshot.evals[-1].mean for e in early], [w.snapshot.evals[-1].mean for w in whole]
    errors = [job.snapshot.evals[-1].stderr for job in (*early, *whole)]
    # of a difference of means of jobs that answer the same problems; those of a seed count apart
    error = math.sqrt(math.fsum(each**2 for each in errors)) / len(whole)
    lost = (mean(gains[1]) - mean(gains[0])) / error
    return [
        Claim(name=f"{name}.whole_over_early", value=round(ratio, 3), unit="x", bar=0.97),
        Claim(
            name=f"{name}.held_out_lost",
            value=round(lost, 2),
            unit="standard errors",
            bar=2,
            less_is_better=True,
        ),
    ]


def _forecast_claim(name: str, whole: list[Job], early: list[Job], mode: str) -> Claim:
    """Compare the ratio of the seconds of a learned token with that of a simulation."""
    seen = median(_of_token(w) / _of_token(e) for w, e in zip(whole, early, strict=True))
    forecast = median(_simulated(job, _WHOLE) / _simulated(job, mode) for job in whole)
    return at_most(name, 100 * abs(forecast / seen - 1), "%", 10.0)


def _of_token(job: Job) -> float:
    return _seconds(job) / sum(step.tokens for step in job.snapshot.steps)


def _simulated(job: Job, mode: str) -> float:
    """Return the seconds of a token that is learned."""
    fit = read_fit(job.folder)
    fitted = fit.job(fit.whole_steps())
    world, trained = simulate(replace(fitted, mode=_SIMULATED[mode], steps=_FORECAST_STEPS))
    return world.now / trained.tokens


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
