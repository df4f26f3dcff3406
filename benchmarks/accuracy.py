"""Compare held-out rewards of policies trained with and without TLT.

`python -m benchmarks.accuracy --out F.json`

Both jobs of a pair have the same seed. One decodes without speculation, the other uses all of TLT
and starts with an untrained drafter. Each is evaluated on the same problems after its last step.
"""

import argparse
import random
import time
from collections import Counter
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any, NamedTuple

from benchmarks.result import Claim, write_result
from benchmarks.stacks import Job, run, session
from benchmarks.sweep import best_settings
from tlt.base.id_types import PromptIndex
from tlt.protocol.events import RolloutScored
from tlt.runs.run_folder_reader import journal_entries

_SEEDS, _STEPS, _PROBLEMS = (1, 2, 3, 4), 12, 512
_BAR = 4.0
_RESAMPLES = 4000


class Pair(NamedTuple):
    seed: int
    # difference in points over the held-out problems: without speculation less all of TLT
    differences: list[float]
    # mean rewards before and after training
    off: list[float]
    tlt: list[float]
    # accept lengths by proposer, and the number of adopted drafters
    accept_lengths: dict[str, float]
    adopted: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    began = time.monotonic()
    with session():
        pairs = [_run_pair(seed, index % 2 == 1) for index, seed in enumerate(_SEEDS)]
    low, high = _interval(pairs)
    claims = [
        Claim(
            name="accuracy.off_minus_tlt",
            value=max(abs(low), abs(high)),
            unit="points from zero, the farther end of the interval",
            bar=_BAR,
            less_is_better=True,
        )
    ]
    details: dict[str, Any] = {
        "mean": fmean(fmean(pair.differences) for pair in pairs),
        "interval": (low, high),
        "by_seed": [
            {
                "seed": pair.seed,
                "difference": fmean(pair.differences),
                "problems_that_differ": sum(map(bool, pair.differences)),
                "before_and_after": {"off": pair.off, "tlt": pair.tlt},
                "accept_lengths": pair.accept_lengths,
                "drafters_adopted": pair.adopted,
            }
            for pair in pairs
        ],
        "problems": _PROBLEMS,
        "steps": _STEPS,
    }
    write_result("accuracy", claims, details, time.monotonic() - began, out)


def _run_pair(seed: int, reverse: bool) -> Pair:
    order = ("cold", "off") if reverse else ("off", "cold")
    jobs = {stack: _job(stack, seed) for stack in order}
    off, tlt = (_rewards(jobs[stack]) for stack in ("off", "cold"))
    assert off.keys() == tlt.keys()
    training = jobs["cold"].snapshot.drafter_training
    assert training is not None
    before_and_after = {
        stack: [found.mean for found in job.snapshot.evals] for stack, job in jobs.items()
    }
    return Pair(
        seed=seed,
        differences=[100 * (off[problem] - tlt[problem]) for problem in sorted(off)],
        off=before_and_after["off"],
        tlt=before_and_after["cold"],
        accept_lengths=_accept_lengths(jobs["cold"]),
        adopted=sum(drafter.adopted for drafter in training.evaluations),
    )


def _accept_lengths(job: Job) -> dict[str, float]:
    rows, tokens = Counter[str](), Counter[str]()
    for found in job.snapshot.acceptance:
        rows[found.proposer] += found.rows
        tokens[found.proposer] += found.tokens
    return {by: round(tokens[by] / rows[by], 3) for by in rows}


def _job(stack: str, seed: int) -> Job:
    return run(
        stack,
        seed,
        f"algorithm.steps={_STEPS}",
        f"algorithm.eval_every={_STEPS}",
        f"data.eval_limit={_PROBLEMS}",
        *best_settings(stack),
    )


def _rewards(job: Job) -> dict[PromptIndex, float]:
    """Return the reward of each held-out problem after the last step."""
    events = (entry.event for entry in journal_entries(job.folder))
    rewards = {
        event.prompt: event.reward
        for event in events
        if isinstance(event, RolloutScored)
        and event.purpose == "eval"
        and event.step == _STEPS
        and event.reward is not None
    }
    assert len(rewards) == _PROBLEMS
    return rewards


def _interval(pairs: list[Pair]) -> tuple[float, float]:
    """Return the interval of the mean difference from a bootstrap over seeds and problems."""
    dice = random.Random(1)
    means = [
        fmean(
            fmean(dice.choices(pair.differences, k=_PROBLEMS))
            for pair in dice.choices(pairs, k=len(pairs))
        )
        for _ in range(_RESAMPLES)
    ]
    cuts = quantiles(means, n=40)
    return cuts[0], cuts[-1]


if __name__ == "__main__":
    main()
