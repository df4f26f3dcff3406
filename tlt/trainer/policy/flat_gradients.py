"""Every parameter's gradient is a view into a few flat buffers while an update runs.

So gradients travel in one collective per buffer, without a copy, and a rank without samples takes
part with zeros. Between updates no gradient holds memory, because decoding needs it.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tlt.trainer.collectives import reduce_sum, split_into_buckets


class Gradients(Protocol):
    """Describe what an optimiser step needs of gradients, whole or sharded."""

    def zero(self) -> None: ...

    def reduce(self, group: ProcessGroup | None) -> None: ...

    def clip(self, limit: float) -> float: ...


class FlatGradients:
    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._flats: list[Tensor] = []
        for bucket in split_into_buckets(parameters):
            sizes = [parameter.numel() for parameter in bucket]
            flat = bucket[0].new_zeros(sum(sizes))
            for parameter, part in zip(bucket, flat.split(sizes), strict=True):
                parameter.grad = part.view_as(parameter)
            self._flats.append(flat)

    def zero(self) -> None:
        for flat in self._flats:
            flat.zero_()

    def reduce(self, group: ProcessGroup | None) -> None:
        for flat in self._flats:
            reduce_sum(flat, group)

    def clip(self, limit: float) -> float:
        """Scale the global norm down to at most `limit`, and return the norm from before."""
        norm = torch.stack([torch.linalg.vector_norm(flat) for flat in self._flats]).norm().item()
        if norm > limit:
            for flat in self._flats:
                flat.mul_(limit / norm)
        return norm


@contextmanager
def flat_gradients(parameters: Sequence[Tensor]) -> Generator[FlatGradients]:
    try:
        yield FlatGradients(parameters)
    finally:
        for parameter in parameters:
            parameter.grad = None
