"""Which number of slots, and which micro-batches of the learner, each stack is fastest with.

`python -m benchmarks.sweep --out F.json`
"""

import argparse
import json
import math
import time
from pathlib import Path

from benchmarks.result import Claim, write_result
from benchmarks.stacks import ROOT, Job, run, session

_SLOTS = (16, 32, 64)
_TOKENS = (4096, 8192, 16384)
_STACKS = ("off", "n-gram", "frozen")
# whoever has a drafter decodes alike; who has none yet begins with n-grams
_LIKE = {"warm": "frozen", "cold": "n-gram", "forced": "frozen"}
_RESULT = ROOT / "benchmarks" / "results" / "sweep.json"
_SEED = 11


def best_settings(stack: str) -> tuple[str, ...]:
    """As they were found, and committed."""
    best = json.loads(_RESULT.read_text())["details"]["best"]
    return (
        f"rollout.slots={best['slots'][_LIKE.get(stack, stack)]}",
        f"algorithm.microbatch_tokens={best['microbatch_tokens']}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    began = time.monotonic()
    rolled: dict[str, dict[int, list[float]]] = {}
    learned: dict[int, list[float]] = {}
    with session():
        for round_ in range(arguments.rounds):
            back = -1 if round_ % 2 else 1
            for slots in _SLOTS[::back]:
                for stack in _STACKS[::back]:
                    job = _job(stack, 2, f"rollout.slots={slots}")
                    seconds = rolled.setdefault(stack, {}).setdefault(slots, [])
                    seconds.append(math.fsum(step.rollout for step in job.steps))
            for tokens in _TOKENS[::back]:
                # the first update brings the trainer up
                job = _job("frozen", 3, f"algorithm.microbatch_tokens={tokens}")
                rest = math.fsum(step.rest for step in job.steps[1:])
                learned.setdefault(tokens, []).append(rest)
    best = {
        "slots": {stack: _fastest(by_slots) for stack, by_slots in rolled.items()},
        "microbatch_tokens": _fastest(learned),
    }
    details = {"rollout_seconds": rolled, "learn_seconds": learned, "best": best}
    tried = Claim(name="sweep.rounds", value=arguments.rounds, unit="", bar=2)
    write_result("sweep", [tried], details, time.monotonic() - began, arguments.out)


def _job(stack: str, steps: int, change: str) -> Job:
    return run(stack, _SEED, f"algorithm.steps={steps}", change)


def _fastest(seconds: dict[int, list[float]]) -> int:
    return min(seconds, key=lambda setting: math.fsum(seconds[setting]))


if __name__ == "__main__":
    main()
