"""Unrolling in training computes what the drafter computes when proposing.

At step 0 a chain reads the policy's states. At step d it reads its own feature of step d - 1 and,
as if its guesses had been right, the sample's next token at the next position.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.base.interrupt_check import CheckInterrupt, never_interrupt
from tlt.kernels.training_kernels import TrainingKernels
from tlt.models.eagle_drafter import Drafter
from tlt.trainer.drafter.chain_attention import KeysValues, attend, attend_in_c
from tlt.trainer.drafter.micro_batches import DrafterBatch


def unroll(
    drafter: Drafter,
    batch: DrafterBatch,
    embedding: Tensor,
    kernels: TrainingKernels | None,
    check: CheckInterrupt = never_interrupt,
) -> Iterator[Tensor]:
    """Yield the readouts [rows, hidden] step by step."""
    captured = len(drafter.config.captured)
    drafter.rotary.reserve(batch.end, batch.positions.device)
    prefix = _prefix(drafter, batch, embedding)
    # training is in float32 at least, whatever the policy's format is
    dtype = drafter.fc.weight.dtype
    features = drafter.feature(batch.states[batch.starts, :captured].to(dtype))
    steps: list[KeysValues] = []

    def attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        steps.append(KeysValues(keys, values))
        first, *later = steps
        if kernels is not None and prefix is None:
            return attend_in_c(kernels, queries, first, later, batch.bounds)
        return attend(queries, first, later, batch.bounds, prefix, check)

    for tokens, positions in zip(batch.tokens, batch.positions, strict=True):
        output = drafter(F.embedding(tokens, embedding).to(dtype), features, positions, attention)
        features = output.feature
        yield output.readout


@torch.no_grad()
def _prefix(drafter: Drafter, batch: DrafterBatch, embedding: Tensor) -> KeysValues | None:
    """Compute keys and values of the rows before a window."""
    count = len(batch.prefix)
    if count == 0:
        return None
    captured, dtype = len(drafter.config.captured), drafter.fc.weight.dtype
    parts: list[KeysValues] = []

    def keep_keys_and_values(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        parts.append(KeysValues(keys, values))
        return queries

    positions = torch.arange(count, device=batch.prefix.device)
    # in parts as large as the window, so that the time between two checks stays bounded
    for rows in positions.split(max(1, batch.rows)):
        features = drafter.feature(batch.states[rows, :captured].to(dtype))
        embedded = F.embedding(batch.prefix[rows], embedding).to(dtype)
        drafter(embedded, features, rows, keep_keys_and_values)
    keys, values = zip(*parts, strict=True)
    return KeysValues(torch.cat(keys, dim=1), torch.cat(values, dim=1))
