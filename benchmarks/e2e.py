"""Measure whole jobs: each stack against decoding without speculation, step by step.

`python -m benchmarks.e2e --out F.json`

Two workers have one core each. Stacks alternate with the same seeds, in reversed order every other
time. Each has the number of slots, and all have the trainer settings, that `benchmarks.sweep` found
best. A step's seconds are those of its rollout and those until the new policy is published.

64 answers a worker show the savings at large batches, 16 those in the tail of a large cluster. All
of it fits into an hour, so a last repetition with 64 is left out on slow machines. The rest of the
hour measures what readiness to train costs with 64, and what training beside short rollouts costs
with 16. Jobs that start without a drafter are those of `benchmarks.cold`.
"""

import argparse
import json
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.result import Claim, write_result
from benchmarks.stacks import ROOT, Job, Ratio, StepTime, ratio, run, session
from benchmarks.sweep import best_settings
from tlt.report import DrafterTraining

# by stack
_Jobs = dict[str, list[Job]]

_STEPS = 10
_REPETITIONS, _MORE_REPETITIONS = 4, 4
_SECONDS, _SPARE_SECONDS = 3600, 60
# tokens that drafters train on
_ORIGINS = ("own", "others", "unfinished", "earlier")
# stacks of jobs with 64 and 16 answers a worker
_STACKS_OF_64 = ("off", "n-gram", "frozen", "warm")
_STACKS_OF_16 = ("off", "n-gram", "frozen", "warm", "forced")
_SETTINGS_OF_64 = (f"algorithm.steps={_STEPS}",)
SETTINGS_OF_16 = (*_SETTINGS_OF_64, "algorithm.prompts_per_step=2", "algorithm.minibatches=1")
# repeats while there is time
_SIDE_BY_SIDE = ("frozen", "warm")
_IDLING = ("frozen", "warm", "forced")
# a session's first job also fills caches, so it is not counted
WARM_UP = (*SETTINGS_OF_16, "algorithm.steps=1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=_REPETITIONS)
    parser.add_argument("--seconds", type=float, default=_SECONDS)
    arguments = parser.parse_args()
    out, repetitions = arguments.out, arguments.rounds
    began = time.monotonic()
    with session():
        run("off", 1, *WARM_UP, *best_settings("off"))
        whole, tail = _take_turns(repetitions, began + arguments.seconds - _SPARE_SECONDS)
    seconds = time.monotonic() - began
    claims = [
        *_warm_claims(whole, tail),
        *_training_claims(tail["forced"]),
        *_idle_claims(tail),
        _duration_claim(seconds),
    ]
    details = {
        "ratios": {
            "64 answers a worker": _table(whole, _STEPS),
            "16 answers a worker": _table(tail, _STEPS),
        },
        "intervals": {
            "frozen_over_tlt": _rounded(
                ratio(whole["frozen"], whole["warm"], _step_seconds, _STEPS)
            ),
            "tail_frozen_over_tlt": _rounded(
                ratio(tail["frozen"], tail["warm"], _step_seconds, _STEPS)
            ),
            "rollout_slowdown": _rounded(
                ratio(tail["forced"], tail["frozen"], _rollout_seconds, _STEPS)
            ),
        },
        "frozen_over_tlt_by_step": _by_step(whole["frozen"], whole["warm"]),
        "slower_while_somebody_trained": round(loss_beside_training(tail), 3),
        "stacks": {name: _account(jobs) for name, jobs in whole.items()},
        "stacks_tail": {name: _account(jobs) for name, jobs in tail.items()},
        "settings": {name: best_settings(name) for name in {**whole, **tail}},
        "engine": _claims_of("engine"),
    }
    write_result("e2e", claims, details, seconds, out)


def _take_turns(repetitions: int, end: float) -> tuple[_Jobs, _Jobs]:
    """Run jobs with 64 and 16 answers a worker."""
    whole, tail = _Jobs(), _Jobs()
    longest = pair = 0.0
    for repetition in range(repetitions - 1):
        longest = max(longest, _turn(whole, repetition, _STACKS_OF_64, _SETTINGS_OF_64))
        _turn(tail, repetition, _STACKS_OF_16, SETTINGS_OF_16)
    lately = _turn(tail, repetitions - 1, _STACKS_OF_16, SETTINGS_OF_16)
    if time.monotonic() + longest < end:
        _turn(whole, repetitions - 1, _STACKS_OF_64, _SETTINGS_OF_64)
    for repetition in range(repetitions, repetitions + _MORE_REPETITIONS):
        if time.monotonic() + (pair or longest) < end:
            pair = _turn(whole, repetition, _SIDE_BY_SIDE, _SETTINGS_OF_64)
        if time.monotonic() + lately < end:
            lately = _turn(tail, repetition, _IDLING, SETTINGS_OF_16)
    return whole, tail


def _turn(jobs: _Jobs, repetition: int, stacks: Sequence[str], settings: tuple[str, ...]) -> float:
    """Run one turn and return its seconds."""
    began = time.monotonic()
    for stack in stacks[:: -1 if repetition % 2 else 1]:
        job = run(stack, 1 + repetition, *settings, *best_settings(stack))
        jobs.setdefault(stack, []).append(job)
    return time.monotonic() - began


def _rollout_seconds(step: StepTime) -> float:
    return step.rollout


def _step_seconds(step: StepTime) -> float:
    return step.whole


def _warm_claims(whole: _Jobs, tail: _Jobs) -> list[Claim]:
    rollouts = ratio(whole["off"], whole["warm"], _rollout_seconds, _STEPS)
    steps = ratio(whole["off"], whole["warm"], _step_seconds, _STEPS)
    tails = ratio(tail["off"], tail["warm"], _step_seconds, _STEPS)
    frozen = ratio(whole["frozen"], whole["warm"], _step_seconds, _STEPS)
    tail_frozen = ratio(tail["frozen"], tail["warm"], _step_seconds, _STEPS)
    share = steps.value / _ceiling(whole["off"], whole["frozen"])
    return [
        Claim(name="e2e.rollout_off_over_tlt", value=rollouts.value, unit="x", bar=1.75),
        Claim(name="e2e.step_off_over_tlt", value=steps.value, unit="x", bar=1.35),
        Claim(name="e2e.tail_step_off_over_tlt", value=tails.value, unit="x", bar=1.5),
        Claim(name="e2e.share_of_ceiling", value=share, unit="", bar=0.93),
        Claim(name="e2e.frozen_over_tlt", value=frozen.value, unit="x", bar=0.98),
        Claim(name="e2e.tail_frozen_over_tlt", value=tail_frozen.value, unit="x", bar=0.98),
    ]


def _ceiling(off: Sequence[Job], frozen: Sequence[Job]) -> float:
    """Return Amdahl's bound from the rollout's share of a plain step and the speed of `frozen`."""
    share = _rollout_share(off, _STEPS)
    return 1.0 / (1.0 - share + share / ratio(off, frozen, _rollout_seconds, _STEPS).value)


def _rollout_share(jobs: Sequence[Job], most: int) -> float:
    steps = [step for job in jobs for step in job.steps[:most]]
    return math.fsum(s.rollout for s in steps) / math.fsum(s.whole for s in steps)


def _training_claims(jobs: Sequence[Job]) -> list[Claim]:
    learned = [d.tokens for d in _drafter_trainings(jobs)]
    least = min(sum(getattr(tokens, origin) for tokens in learned) for origin in _ORIGINS)
    return [
        Claim(name="e2e.least_tokens_of_an_origin", value=least, unit="tokens", bar=1),
        Claim(name="e2e.accuracy_gain", value=_accuracy_gain(), unit="points", bar=15.0),
    ]


def _accuracy_gain() -> float:
    """Return the accuracy gain of the same spec, from the result of `benchmarks.accuracy`."""
    seeds = _result("accuracy")["details"]["by_seed"]
    pairs = [seed["before_and_after"]["off"] for seed in seeds]
    return 100 * math.fsum(after - before for before, after in pairs) / len(pairs)


def _idle_claims(tail: _Jobs) -> list[Claim]:
    """Return how idle seconds were used in jobs that always train."""
    seen = _drafter_trainings(tail["forced"])
    kept = math.fsum(d.idle_kept for d in seen) / max(1e-9, math.fsum(d.idle for d in seen))
    slowest = max(d.stop_p99_micro_batches for d in seen)
    longest = max(d.stop_p99 for d in seen)
    slower = ratio(tail["forced"], tail["frozen"], _rollout_seconds, _STEPS).value - 1.0
    less = {"less_is_better": True}
    return [
        Claim(name="e2e.idle_kept", value=kept, unit="", bar=0.8),
        Claim(name="e2e.stop_p99_micro_batches", value=slowest, unit="", bar=1.25, **less),
        Claim(name="e2e.stop_p99", value=1000 * longest, unit="ms", bar=150, **less),
        Claim(name="e2e.rollout_slowdown", value=slower, unit="", bar=0.1, **less),
    ]


def loss_beside_training(tail: _Jobs) -> float:
    """Return the seconds that rollouts lost per second of training beside them."""
    frozen = {job.seed: job for job in tail["frozen"]}
    longer = [
        ours.rollout - theirs.rollout
        for job in tail["forced"]
        for ours, theirs in zip(job.steps, frozen[job.seed].steps, strict=True)
    ]
    return math.fsum(longer) / max(
        1e-9, math.fsum(d.idle_used for d in _drafter_trainings(tail["forced"]))
    )


def _duration_claim(seconds: float) -> Claim:
    return Claim(name="e2e.seconds", value=seconds, unit="s", bar=_SECONDS, less_is_better=True)


def _drafter_trainings(jobs: Iterable[Job]) -> list[DrafterTraining]:
    return [
        job.snapshot.drafter_training for job in jobs if job.snapshot.drafter_training is not None
    ]


def _table(jobs: _Jobs, most: int) -> dict[str, Any]:
    """Compare each stack with the plain one."""
    off, found = jobs["off"], dict[str, Any]()
    for name, runs in jobs.items():
        rollouts = ratio(off, runs, _rollout_seconds, most)
        share = _rollout_share(off, most)
        found[name] = {
            "rollout_off_over_it": _rounded(rollouts),
            "step_off_over_it": _rounded(ratio(off, runs, _step_seconds, most)),
            "rollout_share": round(_rollout_share(runs, most), 3),
            "ceiling_at_its_rollouts": round(1.0 / (1.0 - share + share / rollouts.value), 3),
        }
    return found


def _rounded(found: Ratio) -> dict[str, float]:
    return {name: round(value, 3) for name, value in found._asdict().items()}


def _by_step(above: Sequence[Job], below: Sequence[Job]) -> list[float]:
    """Return the ratios by step over all seeds, which show when training pays."""
    seconds = [
        [math.fsum(job.steps[step].whole for job in jobs) for step in range(_STEPS)]
        for jobs in (above, below)
    ]
    return [round(one / other, 3) for one, other in zip(*seconds, strict=True)]


def _account(jobs: Sequence[Job]) -> dict[str, Any]:
    phases: dict[str, float] = {}
    for job in jobs:
        for phase, seconds in job.snapshot.phases.items():
            phases[phase] = phases.get(phase, 0.0) + seconds
    trainings = _drafter_trainings(jobs)
    return {
        "seeds": [job.seed for job in jobs],
        "steps": [[(round(s.rollout, 2), round(s.rest, 2)) for s in job.steps] for job in jobs],
        "share_of_phases": {p: round(s / sum(phases.values()), 4) for p, s in phases.items()},
        "share_of_tokens_trained_on": [round(job.snapshot.trained_share, 4) for job in jobs],
        "seconds_saved": [_saved(job) for job in jobs],
        "drafter_tokens": {o: sum(getattr(d.tokens, o) for d in trainings) for o in _ORIGINS},
        "idle": [
            {
                name: round(msgspec.to_builtins(d)[name], 3)
                for name in (
                    *("idle_used", "idle_left", "idle_kept"),
                    *("reading_seconds", "publishing_seconds", "merging_seconds"),
                    "dropped_seconds",
                    *("stops", "stop_p50", "stop_p99", "longest_p95"),
                )
            }
            for d in trainings
        ],
        "divergences": [error for d in trainings for error in d.divergences],
        "drafters": [
            [
                (
                    m.step,
                    m.micro_batches,
                    m.accept_length_before,
                    round(m.accept_length, 3),
                    m.adopted,
                )
                for m in d.evaluations
            ]
            for d in trainings
        ],
    }


def _saved(job: Job) -> dict[str, float] | None:
    """Return the ledger's savings; too few control runs give no interval."""
    if (saved := job.snapshot.savings) is None:
        return None
    total = saved.total
    figures = {"seconds": total.seconds, "low": total.low, "high": total.high, "runs": saved.runs}
    return {name: round(value, 1) for name, value in figures.items()}


def _result(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def _claims_of(name: str) -> dict[str, Any]:
    result = _result(name)
    claims = {claim["name"]: claim["value"] for claim in result["claims"]}
    return {"commit": result["commit"], **claims}


if __name__ == "__main__":
    main()
