"""Invariant: the same seed, recipe and machine give the same weights: steps are counted, not timed.

A shallow network learns first; a deep one made of its repeated layers then learns on.
"""

import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.tiny_reasoner.network import Layer, Network
from examples.tiny_reasoner.task import (
    Habits,
    Problem,
    draw_problem,
    prompt_text,
    worked_solution,
)
from examples.tiny_reasoner.vocabulary import BOS, EOS, PAD, encode

IGNORED = -100
WARM_UP_STEPS = 20
REPORT_STEPS = 50


@dataclass(frozen=True)
class Stage:
    """One run of the optimizers: constant rates for `flat` of the steps, then linear decay."""

    steps: int
    matrix_rate: float
    vector_rate: float = 3e-3
    flat: float = 0.5
    floor: float = 0.02

    def scale(self, step: int) -> float:
        """Return the factor on both rates at a step."""
        falling = (self.steps - step) / (self.steps * (1 - self.flat))
        return min(1.0, (step + 1) / WARM_UP_STEPS, max(self.floor, falling))


@dataclass(frozen=True)
class Example:
    """Token ids of prompt and solution, and the length of the prompt."""

    ids: list[int]
    prompt_length: int


class WorkedBatches:
    """Endless batches of worked problems of about equal length, none of them held out."""

    def __init__(
        self, seed: int, held_out: frozenset[Problem], habits: Habits, tokens: int = 4096
    ) -> None:
        self._rng = random.Random(f"lessons {seed}")
        self._held_out = held_out
        self._habits = habits
        self._tokens = tokens

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            examples = sorted((self._example() for _ in range(1024)), key=lambda e: len(e.ids))
            buckets = list(self._buckets(examples))
            self._rng.shuffle(buckets)
            for bucket in buckets:
                yield _tensors(bucket)

    def _example(self) -> Example:
        problem = draw_problem(self._rng)
        while problem in self._held_out:
            problem = draw_problem(self._rng)
        prompt = [BOS, *encode(prompt_text(problem))]
        solution = encode(worked_solution(problem, self._rng, self._habits))
        return Example([*prompt, *solution, EOS], len(prompt))

    def _buckets(self, examples: list[Example]) -> Iterator[list[Example]]:
        # The last few, too few for a bucket, are left out.
        bucket: list[Example] = []
        for example in examples:
            bucket.append(example)
            if len(bucket) * len(example.ids) >= self._tokens:
                yield bucket
                bucket = []


def train(
    network: Network,
    batches: Iterator[tuple[Tensor, Tensor]],
    stage: Stage,
    dtype: torch.dtype = torch.bfloat16,
) -> float:
    """Train in place; return the mean loss of the last steps."""
    matrices = [p for p in network.layers.parameters() if p.dim() == 2]
    others = [p for p in network.layers.parameters() if p.dim() == 1]
    others += [network.embedding, network.norm]
    muon = torch.optim.Muon(matrices, lr=stage.matrix_rate, weight_decay=0.0)
    adam = torch.optim.AdamW(others, lr=stage.vector_rate, betas=(0.9, 0.95), weight_decay=0.0)
    average, started = float("nan"), time.perf_counter()
    for step in range(stage.steps):
        _set_rates(muon, stage.matrix_rate * stage.scale(step))
        _set_rates(adam, stage.vector_rate * stage.scale(step))
        loss = _backward(network, *next(batches), dtype)
        average = loss if step == 0 else 0.95 * average + 0.05 * loss
        for optimizer in (muon, adam):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if (step + 1) % REPORT_STEPS == 0:
            seconds = time.perf_counter() - started
            print(f"{step + 1} steps, {seconds:.0f} s, loss {average:.4f}", file=sys.stderr)
    return average


def stacked(shallow: Network, layers: int) -> Network:
    """Repeat each layer, its outputs divided so that their sum keeps its size."""
    times = layers // len(shallow.blocks)
    deep = Network(replace(shallow.shape, layers=layers))
    with torch.no_grad():
        deep.embedding.copy_(shallow.embedding)
        deep.norm.copy_(shallow.norm)
    for index, layer in enumerate(deep.blocks):
        layer.load_state_dict(shallow.blocks[index // times].state_dict())
        _divide_outputs(layer, times)
    return deep


def _divide_outputs(layer: Layer, divisor: int) -> None:
    with torch.no_grad():
        layer.attention_out.div_(divisor)
        layer.ffn_out.div_(divisor)


def _backward(network: Network, ids: Tensor, targets: Tensor, dtype: torch.dtype) -> float:
    logits = network(ids, dtype=dtype).float()
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    return loss.item()


def _tensors(bucket: list[Example]) -> tuple[Tensor, Tensor]:
    width = max(len(example.ids) for example in bucket)
    ids = torch.full((len(bucket), width), PAD)
    targets = torch.full((len(bucket), width), IGNORED)
    for row, example in enumerate(bucket):
        length, start = len(example.ids), example.prompt_length
        ids[row, :length] = torch.tensor(example.ids)
        targets[row, start - 1 : length - 1] = torch.tensor(example.ids[start:])
    return ids, targets


def _set_rates(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
