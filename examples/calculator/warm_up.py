"""Teach the tiny reasoner to ask the calculator for a few of its steps, and little else.

python -m examples.calculator.warm_up

It writes `model` beside this file, in four minutes of one core.
"""

import argparse
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from examples.tiny_reasoner.export import llama_weights, round_to_bf16, write_model
from examples.tiny_reasoner.network import Network, Shape
from examples.tiny_reasoner.task import (
    Habits,
    draw_problem,
    eval_problems,
    prompt_text,
    worked_solution,
)
from examples.tiny_reasoner.training import IGNORED, Example, Stage, WorkedBatches, train
from examples.tiny_reasoner.vocabulary import BOS, EOS, encode

_HERE = Path(__file__).parent
_REASONER = _HERE.parent / "tiny_reasoner" / "model" / "model.safetensors"
# first to go on after what the calculator says, which says nothing of when to ask
GO_ON = Stage(45, matrix_rate=0.003, vector_rate=3e-4, flat=0.3)
GO_ON_SHARE = 0.3
# then to ask, which ends when it asks for the second share of its steps; the first is the lessons'
ASK_SHARE, ASKED_SHARE = 0.1, 0.012
ASK_LAYERS, ASK_RATE, MOST_ASK_STEPS = 8, 5e-4, 100
# tokens of a batch
_TOKENS = 2048
_STEP = re.compile(r"(\d\d)\+(\d\d):([^>]*>(\d\d);)")
_SAID = len("2+4=06,1+3+0=04>46;")
_ENDS, _PLUS, _WORKS = encode(">+:")


class AskingBatches(WorkedBatches):
    """Solutions in which the calculator works some steps out; what it says has no loss."""

    share = GO_ON_SHARE
    # False: the token that asks has no loss either
    asks = False

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for ids, targets in super().__iter__():
            length = ids.shape[1]
            # "12+34>": two digits between + and >
            asked = (ids[:, 3:] == _ENDS) & (ids[:, :-3] == _PLUS)
            for place in range(3, min(3 + _SAID, length)):
                targets[:, place:][asked[:, : length - place]] = IGNORED
            if not self.asks:
                targets[:, 2:-1][asked] = IGNORED
            yield ids, targets

    def _example(self) -> Example:
        problem = draw_problem(self._rng)
        while problem in self._held_out:
            problem = draw_problem(self._rng)
        prompt = [BOS, *encode(prompt_text(problem))]
        solution = worked_solution(problem, self._rng, Habits())
        return Example([*prompt, *encode(_STEP.sub(self._asked, solution)), EOS], len(prompt))

    def _asked(self, step: re.Match[str]) -> str:
        """Return "12+34>" for some steps; a wrong result can't be the calculator's."""
        left, right, said, result = step.groups()
        is_right = (int(left) + int(right)) % 100 == int(result)
        asks = is_right and self._rng.random() < self.share
        return f"{left}+{right}>{said}" if asks else step[0]


def read_reasoner() -> Network:
    network = Network(Shape())
    stored = load_file(_REASONER)
    with torch.no_grad():
        for name, part in llama_weights(network):
            part.copy_(stored[name])
    return network


def learn_to_ask(network: Network, batches: Iterator[tuple[Tensor, Tensor]]) -> float:
    """Train the last layers alone, and return the share of the steps that ask.

    Adam keeps to the one direction that this takes, where Muon would change them in all.
    """
    network.requires_grad_(False)
    last = network.layers[-ASK_LAYERS:].requires_grad_(True)
    adam = torch.optim.AdamW(last.parameters(), lr=ASK_RATE, weight_decay=0.0)
    share = 0.0
    for ids, targets in islice(batches, MOST_ASK_STEPS):
        logits = network(ids)
        share = logits.detach().softmax(-1)[targets == _WORKS][:, _ENDS].mean().item()
        if share >= ASKED_SHARE:
            break
        adam.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED).backward()
        adam.step()
    return share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=_HERE / "model")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    network = read_reasoner()
    batches = AskingBatches(0, frozenset(eval_problems()), Habits(), _TOKENS)
    train(network, iter(batches), GO_ON, torch.float32)
    batches.share, batches.asks = ASK_SHARE, True
    print(f"{learn_to_ask(network, iter(batches)):.3f} of the steps ask", flush=True)
    round_to_bf16(network)
    write_model(network, arguments.out)


if __name__ == "__main__":
    main()
