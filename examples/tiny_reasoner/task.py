"""Invariant: a problem's answer depends on its prompt alone, a draw on its `random.Random` alone.

The task: add a chain of two-digit numbers modulo 100, writing out every digit of every step.
"""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MIN_TERMS = 2
MAX_TERMS = 24
MAX_EVAL_TERMS = 16
LOG_MEAN_STEPS = 1.35
LOG_SPREAD_STEPS = 0.6

Problem = tuple[int, ...]
"""The terms of the chain, each 0 to 99."""


@dataclass(frozen=True)
class Habits:
    """Rates of wrong steps and of repeated chains in worked solutions."""

    slip: float = 0.08
    recheck: float = 0.45
    max_chars: int = 900


FLAWLESS = Habits(slip=0.0, recheck=0.0)


def draw_problem(rng: random.Random, max_terms: int = MAX_TERMS) -> Problem:
    """Draw a chain whose number of steps is log-normal, cut to 2..max_terms terms."""
    while True:
        terms = 1 + round(math.exp(rng.gauss(LOG_MEAN_STEPS, LOG_SPREAD_STEPS)))
        if MIN_TERMS <= terms <= max_terms:
            return tuple(rng.randrange(100) for _ in range(terms))


def prompt_text(problem: Problem) -> str:
    """Return the prompt, for (12, 34): "12+34="."""
    return "+".join(f"{term:02d}" for term in problem) + "="


def right_answer(problem: Problem) -> str:
    """Return the sum's last two digits."""
    return f"{sum(problem) % 100:02d}"


def worked_solution(problem: Problem, rng: random.Random, habits: Habits = FLAWLESS) -> str:
    """Return the chain worked out once or repeatedly; the last "#" precedes the answer."""
    text = _worked_chain(problem, rng, habits.slip)
    chain_chars = len(text) + 1
    while len(text) + chain_chars <= habits.max_chars and rng.random() < habits.recheck:
        text += "=" + _worked_chain(problem, rng, habits.slip)
    return text


def final_answer(completion: str) -> str | None:
    """Return the text after the last "#", or None without one."""
    _, mark, answer = completion.rpartition("#")
    return answer if mark else None


def reward(completion: str, answer: str) -> float:
    """Return 1.0 for the right final answer and 0.0 for anything else."""
    return float(final_answer(completion) == answer)


def draw_distinct(
    rng: random.Random, count: int, max_terms: int, taken: frozenset[Problem] = frozenset()
) -> list[Problem]:
    """Draw `count` different problems, none of them in `taken`."""
    drawn: dict[Problem, None] = {}
    while len(drawn) < count:
        problem = draw_problem(rng, max_terms)
        if problem not in taken:
            drawn[problem] = None
    return list(drawn)


def eval_problems(seed: int = 0, count: int = 512) -> list[Problem]:
    """Return the held-out problems of a seed, at most 16 terms each."""
    return draw_distinct(random.Random(f"eval {seed}"), count, MAX_EVAL_TERMS)


def train_problems(seed: int = 0, count: int = 4096, eval_count: int = 512) -> list[Problem]:
    """Return the training problems of a seed, without the first `eval_count` held-out ones."""
    held_out = frozenset(eval_problems(seed, eval_count))
    return draw_distinct(random.Random(f"train {seed}"), count, MAX_TERMS, held_out)


def write_rows(problems: Sequence[Problem], path: Path) -> None:
    """Write one {"prompt", "answer"} object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ({"prompt": prompt_text(p), "answer": right_answer(p)} for p in problems)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_data(folder: Path, seed: int = 0) -> None:
    """Write train.jsonl and eval.jsonl of a seed."""
    write_rows(train_problems(seed), folder / "train.jsonl")
    write_rows(eval_problems(seed), folder / "eval.jsonl")


def _worked_chain(problem: Problem, rng: random.Random, slip: float) -> str:
    total, *others = problem
    steps: list[str] = []
    for term in others:
        result = (total + term) % 100
        if rng.random() < slip:
            result = rng.randrange(100)
        steps.append(f"{total:02d}+{term:02d}:{_digit_work(total, term)}>{result:02d};")
        total = result
    return "".join(steps) + f"#{total:02d}"


def _digit_work(left: int, right: int) -> str:
    ones = left % 10 + right % 10
    carry = ones // 10
    tens = left // 10 + right // 10 + carry
    return f"{left % 10}+{right % 10}={ones:02d},{left // 10}+{right // 10}+{carry}={tens:02d}"
