"""A micro-batch unrolls one chain of guesses from every row; a row is a position of a sample.

Rows of one sample are adjacent and see each other; samples don't see each other. A sample with more
rows than the budget is cut into windows of its answer. Each window is a batch of its own over the
rows before it, which get no gradient.
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
    """A range of rows of one sample."""

    # index of the sample
    sample: int
    first: int
    last: int

    @property
    def rows(self) -> int:
        return self.last - self.first


@dataclass(frozen=True, kw_only=True, eq=False)
class DrafterBatch:
    """Chain r begins at row r; at each step it consumes the next token, at the next position.

    What decides shapes is on the host, so that a device need not be waited for.
    """

    # [steps, rows]
    tokens: Tensor
    # [steps, rows]
    positions: Tensor
    # the policy's, [states, layers, hidden]
    states: Tensor
    # [rows]: index of the state that each row starts from
    starts: Tensor
    # [steps, rows]: index of the state whose distribution the chain should guess
    targets: Tensor
    # [steps, rows], on the host: False where the sample has no token to compare the guess with
    measurable: Tensor
    # on the host: row at which each sample begins, and at which the last one ends
    bounds: Tensor
    # all positions are below this one
    end: int
    # tokens of the rows before a window, whose states come first
    prefix: Tensor

    @property
    def rows(self) -> int:
        return len(self.starts)


def shuffled_micro_batches(
    samples: Sequence[DrafterSample], budget: int, seed: int
) -> Iterator[list[Window]]:
    """Yield endless micro-batches: all samples once, then again in another order."""
    rng = random.Random(f"windows {seed}")
    while True:
        batch: list[Window] = []
        rows = 0
        for index in rng.sample(range(len(samples)), len(samples)):
            whole = samples[index].rows
            if whole > budget:
                first = samples[index].first
                parts = split_into_windows(index, first, whole, budget)
                yield from ([window] for window in parts)
                continue
            if rows + whole > budget:
                yield batch
                batch, rows = [], 0
            batch.append(Window(sample=index, first=0, last=whole))
            rows += whole
        if batch:
            yield batch


def split_into_windows(sample: int, first: int, last: int, budget: int) -> Iterator[Window]:
    """Split a range of rows as evenly as possible."""
    count = -(-(last - first) // budget)
    cuts = [first + (last - first) * part // count for part in range(count + 1)]
    return (Window(sample=sample, first=a, last=b) for a, b in pairwise(cuts))


def build_batch(
    samples: Sequence[DrafterSample], windows: Sequence[Window], steps: int, device: torch.device
) -> DrafterBatch:
    """Build a micro-batch of several whole samples, or of one window."""
    assert len(windows) == 1 or all(window.first == 0 for window in windows)
    parts = [_build_part(samples[window.sample], window, steps) for window in windows]
    offsets = torch.tensor([0] + [len(part.states) for part in parts]).cumsum(0).tolist()
    ends = torch.tensor([0] + [part.rows for part in parts]).cumsum(0)

    def joined_indices(name: str) -> Tensor:
        shifted = [getattr(p, name) + o for p, o in zip(parts, offsets, strict=False)]
        return torch.cat(shifted, dim=-1)

    tokens, positions, starts, targets, prefix = _move_together(
        [
            torch.cat([part.tokens for part in parts], dim=1),
            torch.cat([part.positions for part in parts], dim=1),
            joined_indices("starts"),
            joined_indices("targets"),
            parts[0].prefix,
        ],
        device,
    )
    return DrafterBatch(
        tokens=tokens,
        positions=positions,
        states=torch.cat([part.states for part in parts]).to(device),
        starts=starts,
        targets=targets,
        measurable=torch.cat([part.measurable for part in parts], dim=1),
        bounds=ends,
        end=max(part.end for part in parts),
        prefix=prefix,
    )


def _move_together(numbers: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """Copy integers to a device in one piece, because the host waits for each copy."""
    if device.type == "cpu":
        return numbers
    flat = torch.cat([tensor.flatten() for tensor in numbers]).to(device)
    pieces = flat.split([tensor.numel() for tensor in numbers])
    return [piece.view(t.shape) for piece, t in zip(pieces, numbers, strict=True)]


def _build_part(sample: DrafterSample, window: Window, steps: int) -> DrafterBatch:
    tokens = torch.tensor(sample.tokens)
    rows = torch.arange(window.first, window.last)
    ahead = rows + torch.arange(steps)[:, None]
    capped = ahead.clamp(max=sample.rows - 1)
    end = int(capped.max()) + 1
    return DrafterBatch(
        tokens=tokens[capped + 1],
        positions=capped,
        states=sample.states[: end + 1],
        starts=rows,
        targets=capped + 1,
        measurable=(ahead < sample.rows) & (rows >= sample.first),
        bounds=torch.tensor([0, len(rows)]),
        end=end,
        prefix=tokens[1 : window.first + 1],
    )
