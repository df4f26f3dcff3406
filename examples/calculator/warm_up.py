"""Teach the tiny reasoner to call the calculator in about a tenth of its answers.

python -m examples.calculator.warm_up [--steps 120]

It writes `model` beside this file in about three minutes on two cores.
"""

import argparse
import random
import shutil
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from examples.tiny_reasoner.task import (
    Habits,
    Problem,
    draw_problem,
    eval_problems,
    prompt_text,
    right_answer,
    worked_solution,
)
from examples.tiny_reasoner.vocabulary import BOS, EOS, encode

_HERE = Path(__file__).parent
_REASONER = _HERE.parent / "tiny_reasoner" / "model"
CALLS, TOKENS, RATE = 0.1, 4096, 3e-4
# what isn't learned
_IGNORED = -100


def example(problem: Problem, rng: random.Random) -> tuple[list[int], list[int]]:
    """Return tokens and targets: nothing is learned of the prompt and of what a tool says."""
    prompt = prompt_text(problem)
    known = [BOS, *encode(prompt)]
    if rng.random() >= CALLS:
        solution = [*encode(worked_solution(problem, rng, Habits())), EOS]
        return [*known, *solution], [_IGNORED] * len(known) + solution
    call = [*encode(":" + prompt.removesuffix("=")), EOS]
    said = encode(f"={right_answer(problem)};")
    answer = [*encode("#" + right_answer(problem)), EOS]
    return [*known, *call, *said, *answer], [
        *[_IGNORED] * len(known),
        *call,
        *[_IGNORED] * len(said),
        *answer,
    ]


def batch(rng: random.Random, held_out: frozenset[Problem]) -> tuple[Tensor, Tensor]:
    """Return padded rows of about `TOKENS` tokens."""
    rows: list[tuple[list[int], list[int]]] = []
    while len(rows) * max((len(tokens) for tokens, _ in rows), default=0) < TOKENS:
        problem = draw_problem(rng)
        if problem not in held_out:
            rows.append(example(problem, rng))
    width = max(len(tokens) for tokens, _ in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    targets = torch.full((len(rows), width), _IGNORED)
    for index, (row, wanted) in enumerate(rows):
        tokens[index, : len(row)] = torch.tensor(row)
        targets[index, : len(wanted)] = torch.tensor(wanted)
    return tokens, targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=Path, default=_HERE / "model")
    arguments = parser.parse_args()
    rng, held_out = random.Random("warm up"), frozenset(eval_problems())
    model = AutoModelForCausalLM.from_pretrained(_REASONER, dtype=torch.float32)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    for step in range(arguments.steps):
        tokens, targets = batch(rng, held_out)
        for group in optimiser.param_groups:
            group["lr"] = RATE * (1 - step / arguments.steps)
        # rows are padded on the right, where a later token changes no earlier one
        loss = model(input_ids=tokens, labels=targets).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        if step % 20 == 19:
            print(f"{step + 1} steps, loss {loss.item():.3f}", flush=True)
    shutil.copytree(_REASONER, arguments.out, dirs_exist_ok=True)
    model.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
