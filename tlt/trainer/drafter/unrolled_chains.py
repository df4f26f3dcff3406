"""Unrolled, the drafter computes what it would propose: the same inputs, keys and turns.

At step 0 a chain reads the policy's states; at step d its own feature of step d - 1 and, as if its
guesses had been right, the sample's next token, and turns with the next position.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.interrupt import CheckInterrupt, never_interrupt
from tlt.kernels.training_kernels import TrainingKernels
from tlt.models.eagle_drafter import Drafter
from tlt.trainer.drafter.chain_attention import Pairs, attend, attend_natively
from tlt.trainer.drafter.micro_batches import DrafterBatch


def unroll(
    drafter: Drafter,
    batch: DrafterBatch,
    embedding: Tensor,
    kernels: TrainingKernels | None,
    check: CheckInterrupt = never_interrupt,
) -> Iterator[Tensor]:
    """The readouts [rows, hidden] of one step after the other."""
    read = len(drafter.config.captured)
    before = _before(drafter, batch, embedding)
    features = drafter.feature(batch.states[batch.places, :read])
    steps: list[Pairs] = []

    def attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        steps.append(Pairs(keys, values))
        seen, *own = steps
        if kernels is not None and before is None:
            return attend_natively(kernels, queries, seen, own, batch.bounds)
        return attend(queries, seen, own, batch.bounds, before, check)

    for tokens, positions in zip(batch.tokens, batch.positions, strict=True):
        guess = drafter(F.embedding(tokens, embedding), features, positions, attention)
        features = guess.feature
        yield guess.readout


@torch.no_grad()
def _before(drafter: Drafter, batch: DrafterBatch, embedding: Tensor) -> Pairs | None:
    """Keys and values of the rows before a window; what these would guess is of no interest."""
    count = len(batch.before)
    if count == 0:
        return None
    read = len(drafter.config.captured)
    found: list[Pairs] = []

    def keep(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        found.append(Pairs(keys, values))
        return queries

    positions = torch.arange(count, device=batch.before.device)
    # as many at a time as the window has rows, or there would be no look for long
    for rows in positions.split(max(1, batch.rows)):
        features = drafter.feature(batch.states[rows, :read])
        drafter(F.embedding(batch.before[rows], embedding), features, rows, keep)
    keys, values = zip(*found, strict=True)
    return Pairs(torch.cat(keys, dim=1), torch.cat(values, dim=1))
