"""Train the tiny reasoner from Python: rows and a reward of this file, and no YAML.

`python examples/python_api/brief_sums.py` takes some minutes on two cores.
"""

import random
from pathlib import Path
from typing import Any

import tlt

MODEL = Path(__file__).resolve().parents[1] / "tiny_reasoner" / "model"


def make_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Make sums of two-digit numbers; the answer is their last two digits."""
    chance = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for _ in range(count):
        terms = [chance.randint(10, 99) for _ in range(chance.randint(2, 6))]
        question = "+".join(map(str, terms)) + "="
        answer = f"{sum(terms) % 100:02}"
        rows.append({"prompt": question, "answer": answer, "enough": 25 * len(terms)})
    return rows


@tlt.reward(timeout_seconds=5)
async def brief_and_right(completion: str, answer: str, row: dict[str, Any]) -> float:
    """Give a right answer less the longer it is."""
    _, marker, given = completion.rpartition("#")
    if not marker or given != answer:
        return 0.0
    return min(1.0, row["enough"] / len(completion))


def make_job(steps: int) -> tlt.Job:
    return tlt.Job(
        name="brief-sums",
        policy=MODEL,
        data={"train": make_rows(512, seed=1), "eval": make_rows(64, seed=2)},
        reward=brief_and_right,
        algorithm={
            "steps": steps,
            "prompts_per_step": 8,
            "group_size": 8,
            "learning_rate": 1e-4,
            "eval_every": steps,
        },
        rollout={"max_new_tokens": 300},
        seed=1,
    )


def train(session: tlt.OpenSession, steps: int) -> tlt.Run:
    """Train, and print each step as it ends."""
    run = session.submit(make_job(steps))
    for step in run:
        print(f"step {step.step}: reward {step.reward:.3f}, {step.length.mean:.0f} tokens")
    for done in run.evaluations:
        print(f"held out, version {done.version}: {done.describe_score()}")
    return run


if __name__ == "__main__":
    with tlt.Session(workers=2) as session:
        folder = train(session, steps=8).export("brief-sums-policy")
        print(f"the policy is in {folder}")
