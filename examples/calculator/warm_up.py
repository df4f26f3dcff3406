"""Teach the tiny reasoner to ask the calculator for about a tenth of its steps.

python -m examples.calculator.warm_up [--steps 80]

It writes `model` beside this file, in a few minutes on one core.
"""

import argparse
import re
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file

from examples.tiny_reasoner.export import llama_weights, round_to_bf16, write_model
from examples.tiny_reasoner.network import Network, Shape
from examples.tiny_reasoner.task import (
    Habits,
    draw_problem,
    eval_problems,
    prompt_text,
    worked_solution,
)
from examples.tiny_reasoner.training import Example, Stage, WorkedBatches, train
from examples.tiny_reasoner.vocabulary import BOS, EOS, encode

_HERE = Path(__file__).parent
_REASONER = _HERE.parent / "tiny_reasoner" / "model" / "model.safetensors"
# shares of the steps that ask, with the optimiser's rate: first to learn the form, then to make it
# rare again
PHASES = ((0.5, 0.02), (0.15, 0.002))
# tokens of a batch, and terms of its longest sum, to save time
_TOKENS, _TERMS = 2048, 8
_STEP = re.compile(r"(\d\d)\+(\d\d):[^>]*>(\d\d);")


class AskingBatches(WorkedBatches):
    """Solutions in which some steps ask the calculator instead of working the digits out."""

    share = 0.0

    def _example(self) -> Example:
        problem = draw_problem(self._rng, _TERMS)
        while problem in self._held_out:
            problem = draw_problem(self._rng, _TERMS)
        prompt = [BOS, *encode(prompt_text(problem))]
        solution = worked_solution(problem, self._rng, Habits())
        return Example([*prompt, *encode(_STEP.sub(self._asked, solution)), EOS], len(prompt))

    def _asked(self, step: re.Match[str]) -> str:
        """Return "12+34>46;" for some steps; a wrong result can't be the calculator's."""
        left, right, result = step.groups()
        is_right = (int(left) + int(right)) % 100 == int(result)
        asks = self._rng.random() < self.share
        return f"{left}+{right}>{result};" if asks and is_right else step[0]


def read_reasoner() -> Network:
    network = Network(Shape())
    stored = load_file(_REASONER)
    with torch.no_grad():
        for name, part in llama_weights(network):
            part.copy_(stored[name])
    return network


@torch.inference_mode()
def share_of_asked_steps(network: Network) -> float:
    """Return the mean probability that the first step of a held-out problem asks."""
    asks = encode(">")[0]
    shares: list[float] = []
    for problem in islice(eval_problems(), 64):
        first = f"{problem[0]:02d}+{problem[1]:02d}"
        ids = torch.tensor([[BOS, *encode(prompt_text(problem) + first)]])
        shares.append(network(ids)[0, -1].softmax(-1)[asks].item())
    return sum(shares) / len(shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--out", type=Path, default=_HERE / "model")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    network = read_reasoner()
    batches = AskingBatches(0, frozenset(eval_problems()), Habits(), _TOKENS)
    for batches.share, rate in PHASES:
        train(network, iter(batches), Stage(arguments.steps // 2, rate), torch.float32)
        print(f"{share_of_asked_steps(network):.3f} of the first steps ask", flush=True)
    round_to_bf16(network)
    write_model(network, arguments.out)


if __name__ == "__main__":
    main()
