"""Teach the tiny reasoner to call the calculator in about a tenth of its answers.

python -m examples.calculator.warm_up [--steps 100]

It writes `model` beside this file, in a few minutes on one core.
"""

import argparse
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file

from examples.tiny_reasoner.export import llama_weights, round_to_bf16, write_model
from examples.tiny_reasoner.network import Network, Shape
from examples.tiny_reasoner.task import (
    MAX_TERMS,
    Habits,
    Problem,
    draw_problem,
    eval_problems,
    prompt_text,
    right_answer,
    worked_solution,
)
from examples.tiny_reasoner.training import Example, Stage, WorkedBatches, train
from examples.tiny_reasoner.vocabulary import BOS, EOS, encode

_HERE = Path(__file__).parent
_REASONER = _HERE.parent / "tiny_reasoner" / "model" / "model.safetensors"
_CALL = encode(":")[0]
# of a batch
_TOKENS = 2048
# of the sums that are worked out, to save time
_WORKED_TERMS = 5
# of the answers in a batch, first to learn the form, then to make calls rare again
SHARES = (0.5, 0.1)


class MixedBatches(WorkedBatches):
    """Batches in which some answers ask the calculator instead of working the sum out."""

    share = 0.0

    def _example(self) -> Example:
        asks = self._rng.random() < self.share
        problem = self._problem(MAX_TERMS if asks else _WORKED_TERMS)
        prompt = [BOS, *encode(prompt_text(problem))]
        if not asks:
            solution = encode(worked_solution(problem, self._rng, Habits()))
            return Example([*prompt, *solution, EOS], len(prompt))
        total = right_answer(problem)
        # what the calculator says is in the text, and nobody samples it
        asked = [*encode(":" + prompt_text(problem).removesuffix("=")), EOS]
        return Example([*prompt, *asked, *encode(f"={total};#{total}"), EOS], len(prompt))

    def _problem(self, most_terms: int) -> Problem:
        while (problem := draw_problem(self._rng, most_terms)) in self._held_out:
            pass
        return problem


def read_reasoner() -> Network:
    network = Network(Shape())
    stored = load_file(_REASONER)
    with torch.no_grad():
        for name, part in llama_weights(network):
            part.copy_(stored[name])
    return network


@torch.inference_mode()
def share_of_calls(network: Network) -> float:
    """Return the mean probability that an answer to a held-out problem begins with a call."""
    shares: list[float] = []
    for problem in islice(eval_problems(), 64):
        ids = torch.tensor([[BOS, *encode(prompt_text(problem))]])
        shares.append(network(ids)[0, -1].softmax(-1)[_CALL].item())
    return sum(shares) / len(shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--out", type=Path, default=_HERE / "model")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    network = read_reasoner()
    mixed = MixedBatches(0, frozenset(eval_problems()), Habits(), _TOKENS)
    for share in SHARES:
        mixed.share = share
        stage = Stage(arguments.steps // 2, arguments.rate, 1e-3)
        train(network, iter(mixed), stage, torch.float32)
        print(f"begins with a call: {share_of_calls(network):.3f}", flush=True)
    round_to_bf16(network)
    write_model(network, arguments.out)


if __name__ == "__main__":
    main()
