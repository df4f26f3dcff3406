"""Find the number of slots and the micro-batch size with which each stack is fastest.

`python -m benchmarks.sweep --out F.json`

Each has as many answers a worker as in `benchmarks.e2e`, 64, or as in `benchmarks.cold`, 32 (16 fit
into any number of slots).
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.result import Claim, write_result
from benchmarks.stacks import ROOT, run, session

_SLOTS = (16, 32, 64)
_TOKENS = (4096, 8192, 16384)


class _Trial(NamedTuple):
    stack: str
    steps: int
    answers: int

    def settings(self) -> tuple[str, ...]:
        # groups of sixteen answers, for two workers
        prompts = self.answers * 2 // 16
        return f"algorithm.steps={self.steps}", f"algorithm.prompts_per_step={prompts}"


# a job without a drafter needs some steps to train one
_TRIALS = (
    _Trial("off", 2, 64),
    _Trial("off", 3, 32),
    _Trial("n-gram", 3, 32),
    _Trial("frozen", 2, 64),
    _Trial("cold", 12, 32),
)
# all stacks with a drafter decode alike
_DECODES_LIKE = {"warm": "frozen", "forced": "frozen", "idle-only": "cold"}
_RESULT = ROOT / "benchmarks" / "results" / "sweep.json"
_SEED = 11


def best_settings(stack: str) -> tuple[str, ...]:
    """Return the settings of the committed result."""
    best = json.loads(_RESULT.read_text())["details"]["best"]
    return (
        f"rollout.slots={best['slots'][_DECODES_LIKE.get(stack, stack)]}",
        f"algorithm.microbatch_tokens={best['microbatch_tokens']}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    began = time.monotonic()
    rollout_seconds: dict[str, dict[int, list[float]]] = {}
    update_seconds: dict[int, list[float]] = {}
    with session():
        # a session's first job also fills caches, so it is not counted
        run("off", _SEED, "algorithm.steps=1")
        for repetition in range(arguments.rounds):
            back = -1 if repetition % 2 else 1
            for slots in _SLOTS[::back]:
                for tried in _TRIALS[::back]:
                    if slots > tried.answers and tried.stack != "off":
                        continue  # no more slots than answers are used
                    job = run(tried.stack, _SEED, *tried.settings(), f"rollout.slots={slots}")
                    seconds = rollout_seconds.setdefault(tried.stack, {}).setdefault(slots, [])
                    seconds.append(math.fsum(step.rollout for step in job.steps))
            for tokens in _TOKENS[::back]:
                settings = "algorithm.steps=3", f"algorithm.microbatch_tokens={tokens}"
                job = run("frozen", _SEED, *settings)
                # the first update also starts the trainer
                rest = math.fsum(step.rest for step in job.steps[1:])
                update_seconds.setdefault(tokens, []).append(rest)
    best = {
        "slots": {stack: _fastest(by_slots) for stack, by_slots in rollout_seconds.items()},
        "microbatch_tokens": _fastest(update_seconds),
    }
    details = {"rollout_seconds": rollout_seconds, "update_seconds": update_seconds, "best": best}
    tried = Claim(name="sweep.rounds", value=arguments.rounds, unit="", bar=2)
    write_result("sweep", [tried], details, time.monotonic() - began, arguments.out)


def _fastest(seconds: dict[int, list[float]]) -> int:
    return min(seconds, key=lambda setting: math.fsum(seconds[setting]))


if __name__ == "__main__":
    main()
