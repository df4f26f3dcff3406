"""Compare jobs of SmolLM2-135M: a drafter trained before, trained on or frozen, n-grams, and none.

`python -m benchmarks.trained_drafter --drafter FOLDER --out F.json [--steps 12] [--seeds 1 2 3]
[--arms off frozen online n-gram] [--many]`

FOLDER is what `tlt drafter train` made from the policy's own answers to prompts of this task, with
another seed than these jobs' prompts (`--make-prompts FILE` writes them). Two workers have one core
each and 16 answers a step each. The task: sums of two or three numbers, asked in the chat template,
with answers of up to 200 tokens. Jobs of one seed follow each other in an order that rotates. Their
answers are the same, so what differs is how they were decoded. With `--many` four steps follow in
which a worker has 64 answers, which is the best number of slots.
"""

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.result import Claim, write_result
from benchmarks.stacks import ROOT, Job, StepTime, ratio, run, session
from examples.smollm2.prepare import prepare
from tlt.runs.run_answers import read_answers

_SPEC = ROOT / "examples" / "smollm2" / "job.yaml"
_SPECULATES = "speculation.mode=adaptive"
_TASK = "chain_sum?min_terms=2&max_terms=3&min_digits=1&max_digits=2"
_TRAINING_PROMPTS = 1056
_COMMON = (
    f"data.train=reasoning_gym:{_TASK}&seed=2000003&size=2000",
    "data.eval=null",
    "data.chat_template=true",
    "policy.max_context=256",
    "rollout.max_new_tokens=200",
    "rollout.slots=auto",
    "algorithm.eval_every=0",
)
_FEW, _MANY = "algorithm.prompts_per_step=4", "algorithm.prompts_per_step=16"
_MANY_STEPS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--make-prompts", type=Path)
    parser.add_argument("--many", action="store_true")
    parser.add_argument("--arms", nargs="+", default=["off", "frozen", "online", "n-gram"])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=[1, 2, 3], nargs="+")
    arguments = parser.parse_args()
    if arguments.make_prompts is not None:
        _make_prompts(arguments.make_prompts)
    elif arguments.drafter is not None:
        _compare(arguments)
    else:
        parser.error("--drafter or --make-prompts is needed")


def _compare(arguments: argparse.Namespace) -> None:
    began = time.monotonic()
    common = (*_COMMON, f"policy.path={prepare(print)}")
    path = f"drafter.path={arguments.drafter.resolve()}"
    arms: dict[str, tuple[str, ...]] = {
        "off": (),
        "frozen": (_SPECULATES, path, "drafter.train=off"),
        "online": (_SPECULATES, path, "drafter.train=auto"),
        "n-gram": (_SPECULATES, "speculation.depths=[]", "drafter.train=off"),
    }
    jobs = {arm: list[Job]() for arm in arguments.arms}
    many = {arm: list[Job]() for arm in ("off", "online") if arguments.many}
    with session():
        # a session's first job also fills caches
        run("off", 9, *common, _FEW, "algorithm.steps=1", spec=_SPEC)
        for number, seed in enumerate(arguments.seeds):
            names = list(jobs)
            for arm in names[number % len(names) :] + names[: number % len(names)]:
                changes = (*common, *arms[arm], _FEW, f"algorithm.steps={arguments.steps}")
                jobs[arm].append(run("off", seed, *changes, spec=_SPEC))
        for arm, found in many.items():
            changes = (*common, *arms[arm], _MANY, f"algorithm.steps={_MANY_STEPS}")
            found.append(run("off", 1, *changes, spec=_SPEC))
        details = {
            "arms": {arm: [_describe(job) for job in found] for arm, found in jobs.items()},
            "many_answers": {arm: [_describe(job) for job in found] for arm, found in many.items()},
            "ratios": _ratios(jobs),
        }
    claims = _claims(jobs, many)
    write_result("trained_drafter", claims, details, time.monotonic() - began, arguments.out)


def _make_prompts(file: Path) -> None:
    from reasoning_gym import create_dataset

    rows = create_dataset(
        "chain_sum", size=_TRAINING_PROMPTS, seed=1, min_terms=2, max_terms=3, max_digits=2
    )
    file.write_text("".join(json.dumps({"prompt": row["question"]}) + "\n" for row in rows))


def _rollout(step: StepTime) -> float:
    return step.rollout


def _whole(step: StepTime) -> float:
    return step.whole


def _claims(jobs: Mapping[str, Sequence[Job]], many: Mapping[str, Sequence[Job]]) -> list[Claim]:
    natural = [1 - step.truncated for job in jobs["off"] for step in job.snapshot.steps]
    claims = [
        _ratio_claim("rollouts", jobs, "online", 1.15),
        _ratio_claim("frozen_rollouts", jobs, "frozen", 1.15),
        Claim(
            name="trained_drafter.natural_stops",
            value=round(math.fsum(natural) / len(natural), 3),
            unit="of answers",
            bar=0.8,
        ),
    ]
    return [*claims, _ratio_claim("full_slots", many, "online", 0.97)] if many else claims


def _ratio_claim(name: str, jobs: Mapping[str, Sequence[Job]], arm: str, bar: float) -> Claim:
    value = ratio(jobs["off"], jobs[arm], _rollout).value
    return Claim(name=f"trained_drafter.{name}", value=round(value, 3), unit="x", bar=bar)


def _ratios(jobs: Mapping[str, Sequence[Job]]) -> dict[str, dict[str, Any]]:
    """Return the seconds without speculation by those of each arm, with 95 % intervals."""
    pairs = [("off", arm) for arm in jobs if arm != "off"] + [("frozen", "online")]
    return {
        f"{above}/{below}": {
            "rollouts": ratio(jobs[above], jobs[below], _rollout)._asdict(),
            "steps": ratio(jobs[above], jobs[below], _whole)._asdict(),
        }
        for above, below in pairs
    }


def _describe(job: Job) -> dict[str, Any]:
    saved, trained = job.snapshot.savings, job.snapshot.drafter_training
    return {
        "seed": job.seed,
        "rollout": [round(step.rollout, 2) for step in job.steps],
        "rest": [round(step.rest, 2) for step in job.steps],
        "natural_stops": [round(1 - step.truncated, 3) for step in job.snapshot.steps],
        "rewards": [round(step.reward, 3) for step in job.snapshot.steps],
        "tokens": [step.tokens for step in job.snapshot.steps],
        "repeated_4_grams": round(_repeated(job), 3),
        "savings": None
        if saved is None
        else [round(each, 1) for each in (saved.total.seconds, saved.total.low, saved.total.high)],
        "accepted_a_step": [
            [each.proposer, each.bucket, round(each.tokens / each.rows, 2), each.rows]
            for each in job.snapshot.acceptance
        ],
        "accept_lengths": []
        if trained is None
        else [round(each.accept_length, 3) for each in trained.evaluations],
        "idle_used": None if trained is None else round(trained.idle_used, 1),
    }


def _repeated(job: Job) -> float:
    """Return the share of the last step's 4-grams of words that the same answer has already had."""
    repeated = total = 0
    for answer in read_answers(job.folder, "train"):
        words = (answer.text or "").split()
        grams = Counter(zip(words, words[1:], words[2:], words[3:], strict=False))
        total += grams.total()
        repeated += grams.total() - len(grams)
    return repeated / total if total else 0.0


if __name__ == "__main__":
    main()
