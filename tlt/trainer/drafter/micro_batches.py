"""A micro-batch unrolls chains of guesses: one from every row, a row being a position of a sample.

Rows of one sample lie together and see each other; samples don't. An answer in a sample with more
rows than the budget is cut into windows, each a batch of its own over the rows before it, which get
no gradient.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tlt.trainer.drafter.samples import DrafterSample


@dataclass(frozen=True, kw_only=True)
class Window:
    """Rows of the sample with that number."""

    sample: int
    first: int
    last: int

    @property
    def rows(self) -> int:
        return self.last - self.first


@dataclass(frozen=True, kw_only=True, eq=False)
class DrafterBatch:
    """Chain r begins at row r; at step d it consumes a token d further on, at a position so far."""

    # [steps, rows]
    tokens: Tensor
    # [steps, rows]
    positions: Tensor
    # [places, layers, hidden] of the policy
    states: Tensor
    # [rows]: the place of each row's states
    places: Tensor
    # [steps, rows]: the place whose last state gives what the chain should guess
    aims: Tensor
    # [steps, rows]: whether the chain's guess can be measured
    live: Tensor
    # where samples begin among the rows, and where the last one ends
    bounds: Tensor
    # of the rows before a window: their tokens; their states are the first places
    before: Tensor

    @property
    def rows(self) -> int:
        return len(self.places)


def shuffled_micro_batches(
    samples: Sequence[DrafterSample], budget: int, seed: int
) -> Iterator[list[Window]]:
    """Endless micro-batches: all samples once, then again in another order."""
    dice = random.Random(f"windows {seed}")
    while True:
        chosen: list[Window] = []
        rows = 0
        for index in dice.sample(range(len(samples)), len(samples)):
            whole = samples[index].rows
            if whole > budget:
                first = samples[index].first
                yield from ([window] for window in split_into_windows(index, first, whole, budget))
                continue
            if rows + whole > budget:
                yield chosen
                chosen, rows = [], 0
            chosen.append(Window(sample=index, first=0, last=whole))
            rows += whole
        if chosen:
            yield chosen


def split_into_windows(sample: int, first: int, last: int, budget: int) -> Iterator[Window]:
    """As even as can be."""
    count = -(-(last - first) // budget)
    cuts = [first + (last - first) * part // count for part in range(count + 1)]
    return (Window(sample=sample, first=a, last=b) for a, b in pairwise(cuts))


def build_batch(
    samples: Sequence[DrafterSample], chosen: Sequence[Window], steps: int, device: torch.device
) -> DrafterBatch:
    """Several whole samples, or one window."""
    assert len(chosen) == 1 or all(window.first == 0 for window in chosen)
    parts = [_part(samples[window.sample], window, steps) for window in chosen]
    offsets = torch.tensor([0] + [len(part.states) for part in parts]).cumsum(0).tolist()
    ends = torch.tensor([0] + [part.rows for part in parts]).cumsum(0)

    def placed(name: str) -> Tensor:
        shifted = [getattr(p, name) + o for p, o in zip(parts, offsets, strict=False)]
        return torch.cat(shifted, dim=-1)

    return DrafterBatch(
        tokens=torch.cat([part.tokens for part in parts], dim=1).to(device),
        positions=torch.cat([part.positions for part in parts], dim=1).to(device),
        states=torch.cat([part.states.to(device) for part in parts]),
        places=placed("places").to(device),
        aims=placed("aims").to(device),
        live=torch.cat([part.live for part in parts], dim=1).to(device),
        bounds=ends.to(device),
        before=parts[0].before.to(device),
    )


def _part(sample: DrafterSample, window: Window, steps: int) -> DrafterBatch:
    tokens = torch.tensor(sample.tokens)
    rows = torch.arange(window.first, window.last)
    ahead = rows + torch.arange(steps)[:, None]
    known = ahead.clamp(max=sample.rows - 1)
    return DrafterBatch(
        tokens=tokens[known + 1],
        positions=known,
        states=sample.states[: int(known.max()) + 2],
        places=rows,
        aims=known + 1,
        live=(ahead < sample.rows) & (rows >= sample.first),
        bounds=torch.tensor([0, len(rows)]),
        before=tokens[1 : window.first + 1],
    )
